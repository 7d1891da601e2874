"""What this machine is, read from /proc and /sys; where there is no such thing, None or empty."""

from __future__ import annotations

import math
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

MAX_THREADS = 1024
"""That kernels may be asked to run on."""

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Processor:
    """Name, architecture, and what it can do."""

    name: str
    architecture: str
    features: tuple[str, ...]
    """Those of FEATURES that it has."""


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """What this process may use. Sizes in bytes; None where nothing limits it, or it is not known.

    Control groups are nested: a process is held by its own and by all above it.
    """

    cores: int
    cores_allowed: int
    """By the affinity mask."""
    cpu_quota: float | None
    """Cores' worth of time that the control groups grant: the least of all."""
    memory_total: int | None
    memory_available: int | None
    """On the whole machine, without swapping (MemAvailable)."""
    memory_limit: int | None
    """The lowest limit of the control groups, if it is below the total."""
    memory_left: int | None
    """The least that a control group with a limit has left: the limit less its working set, which
    is its usage without the file pages that can be dropped (inactive_file)."""

    @property
    def threads(self) -> int:
        """Threads that can compute at once; more would wait for those whose time is used up."""
        if self.cpu_quota is None:
            return self.cores_allowed
        return max(1, min(self.cores_allowed, math.floor(self.cpu_quota)))

    @property
    def memory_usable(self) -> int | None:
        """What a new process could take now, before swapping or being killed."""
        known = (self.memory_available, self.memory_limit, self.memory_left)
        return min((size for size in known if size is not None), default=None)


def read_processor(root: Path = _ROOT) -> Processor:
    """The processor; `root` is where /proc is looked for."""
    fields = _colon_table(_read(root / "proc/cpuinfo"))
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return Processor(
        name=fields.get("model name") or platform.processor() or platform.machine(),
        architecture=platform.machine(),
        features=tuple(feature for feature in FEATURES if feature in flags),
    )


def read_limits(root: Path = _ROOT) -> MachineLimits:
    """Cores and memory; `root` is where /proc and /sys are looked for."""
    memory = _colon_table(_read(root / "proc/meminfo"))
    total = _kilobytes(memory.get("MemTotal"))
    groups = [
        (limit, left)
        for limit, left in _memory_groups(root)
        if total is None or limit < total  # version 1 writes a huge number for none
    ]
    return MachineLimits(
        cores=os.cpu_count() or 1,
        cores_allowed=_cores_allowed(),
        cpu_quota=_cpu_quota(root),
        memory_total=total,
        memory_available=_kilobytes(memory.get("MemAvailable")),
        memory_limit=min((limit for limit, _ in groups), default=None),
        memory_left=min((left for _, left in groups), default=None),
    )


def default_threads() -> int:
    """Threads of a process that has the machine to itself (`MachineLimits.threads`)."""
    return read_limits().threads


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

    Version 2 is mounted at the top, or beside version 1 as `unified`. In a container the path in
    /proc may lie outside of what is mounted: then only the mount itself, which is the container's
    own group, exists.
    """
    top, folders = root / "sys/fs/cgroup", []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = ["unified", ""]
        elif controller in controllers.split(","):
            names = [controllers, controller]
        else:
            continue
        mount = next((top / name for name in names if (top / name).exists()), top)
        group = mount if ".." in path.split("/") else mount / path.lstrip("/")
        folders += [f for f in (group, *group.parents) if f.is_relative_to(mount) and f.exists()]
    return folders


def _cpu_quota(root: Path) -> float | None:
    quotas = []
    for folder in _cgroup_folders(root, "cpu"):
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        quota = quota or _read(folder / "cpu.cfs_quota_us").strip()
        period = period or _read(folder / "cpu.cfs_period_us").strip()
        if quota.isdecimal() and period.isdecimal() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _memory_groups(root: Path) -> list[tuple[int, int]]:
    """Limit of each control group that has one, and what is left of it."""
    groups = []
    for folder in _cgroup_folders(root, "memory"):
        stat = dict(line.partition(" ")[::2] for line in _read(folder / "memory.stat").splitlines())
        limit = _least(
            _read(folder / "memory.max"),
            _read(folder / "memory.limit_in_bytes"),
            stat.get("hierarchical_memory_limit", ""),  # of groups above, seen or not
        )
        usage = _least(_read(folder / "memory.current"), _read(folder / "memory.usage_in_bytes"))
        cache = _least(stat.get("total_inactive_file") or stat.get("inactive_file", ""))
        if limit is not None:
            working_set = max(0, (usage or 0) - (cache or 0))
            groups.append((limit, max(0, limit - working_set)))
    return groups


def _least(*texts: str) -> int | None:
    """The least of those that are numbers."""
    return min((int(text) for text in texts if text.strip().isdecimal()), default=None)
