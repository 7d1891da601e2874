"""What this machine is, read from /proc and /sys; where there is no such thing, None or empty."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

FEATURES = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512vbmi"),
    *("avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "bf16", "i8mm", "sve"),
)
"""Processor features that kernels could use, as Linux spells them."""

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Processor:
    """Name, architecture, and what it can do."""

    name: str
    architecture: str
    features: tuple[str, ...]
    """Those of FEATURES that it has."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What this process may use. Sizes in bytes; None where nothing limits it, or nobody knows."""

    cores: int
    cores_allowed: int
    """By the affinity mask."""
    cpu_quota: float | None
    """Cores' worth of time that the control groups grant."""
    memory_total: int | None
    memory_available: int | None
    memory_limit: int | None
    """The lowest limit of the control groups, if it is below the total."""

    @property
    def memory_usable(self) -> int | None:
        """What a new process could take now, before swapping or being killed."""
        known = [m for m in (self.memory_available, self.memory_limit) if m is not None]
        return min(known, default=None)


def read_processor(root: Path = _ROOT) -> Processor:
    """The processor; `root` is where /proc is looked for."""
    fields = _colon_table(_read(root / "proc/cpuinfo"))
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return Processor(
        name=fields.get("model name") or platform.processor() or platform.machine(),
        architecture=platform.machine(),
        features=tuple(feature for feature in FEATURES if feature in flags),
    )


def read_limits(root: Path = _ROOT) -> Limits:
    """Cores and memory; `root` is where /proc and /sys are looked for."""
    memory = _colon_table(_read(root / "proc/meminfo"))
    total = _kilobytes(memory.get("MemTotal"))
    limit = _memory_limit(root)
    return Limits(
        cores=os.cpu_count() or 1,
        cores_allowed=_cores_allowed(),
        cpu_quota=_cpu_quota(root),
        memory_total=total,
        memory_available=_kilobytes(memory.get("MemAvailable")),
        memory_limit=limit if limit is not None and (total is None or limit < total) else None,
    )


def _cores_allowed() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _colon_table(text: str) -> dict[str, str]:
    """`name : value` lines; of a name that comes again, the first."""
    table: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            table.setdefault(name.strip(), value.strip())
    return table


def _kilobytes(text: str | None) -> int | None:
    return int(text.split()[0]) * 1024 if text else None


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Folders of this process's control group and its parents, version 1 and 2.

    In a container the path in /proc may lie outside of what is mounted: then only the mount
    itself, which is the container's own group, exists.
    """
    folders = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controllers
            if not mount.exists():
                mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        group = mount / path.lstrip("/")
        folders += [f for f in (group, *group.parents) if f.is_relative_to(mount) and f.exists()]
    return folders


def _cpu_quota(root: Path) -> float | None:
    quotas = []
    for folder in _cgroup_folders(root, "cpu"):
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        quota = quota or _read(folder / "cpu.cfs_quota_us").strip()
        period = period or _read(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _memory_limit(root: Path) -> int | None:
    limits = []
    for folder in _cgroup_folders(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name).strip()
            if text.isdigit():
                limits.append(int(text))
    return min(limits, default=None)
