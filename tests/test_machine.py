"""What a process may use, read from made-up trees of /proc and /sys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bifolio import config, machine
from bifolio.kernels import native, select
from bifolio.machine import MachineLimits, read_limits, read_processor

MEMINFO = "MemTotal:       16000000 kB\nMemFree:  5 kB\nMemAvailable:    8000000 kB\n"
UNLIMITED_V1 = "9223372036854771712\n"
GB = 10**9


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def limits_of(folder: Path, groups: str, files: dict[str, str]) -> MachineLimits:
    """Of a process in these groups; `files` lie under /sys/fs/cgroup."""
    inside = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    return read_limits(tree(folder, {"proc/meminfo": MEMINFO, "proc/self/cgroup": groups} | inside))


def version_2(limit: str, used: int = 0, cache: int = 0) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{used}\n",
        "memory.stat": f"anon 7\ninactive_file {cache}\nactive_file 9\n",
    }


def version_1(limit: str, used: int = 0, cache: int = 0, above: str = "") -> dict[str, str]:
    """`above` is the limit of the groups above, as version 1 tells it to those that see none."""
    stat = f"inactive_file 1\ntotal_inactive_file {cache}\n"
    stat += f"hierarchical_memory_limit {above}\n" if above else ""
    return {
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": f"{used}\n",
        "memory.stat": stat,
    }


def under(path: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{path}/{name}": text for name, text in files.items()}


# ── processor time ───────────────────────────────────────────────────────────────────────────

QUOTA = {"cpu.cfs_quota_us": "300000\n", "cpu.cfs_period_us": "100000\n"}
V1 = "5:memory:/x\n4:cpu,cpuacct:/x\n1:name=systemd:/\n"
CPU: dict[str, tuple[str, dict[str, str], float | None]] = {
    "version 2": ("0::/a\n", {"a/cpu.max": "150000 100000\n"}, 1.5),
    "version 2, the tightest of all": (
        "0::/a/b/c\n",
        {
            "a/cpu.max": "150000 100000\n",
            "a/b/cpu.max": "max 100000\n",
            "a/b/c/cpu.max": "40000 20000\n",
        },
        1.5,
    ),
    "version 2, a group of others": ("0::/a\n", {"b/cpu.max": "10000 100000\n"}, None),
    "version 2, no quota": ("0::/\n", {"cpu.max": "max 100000\n"}, None),
    "version 2, from inside a container": ("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5),
    "version 2, a path of the host": ("0::/docker/x\n", {"cpu.max": "50000 100000\n"}, 0.5),
    "version 2, a path beside the root": ("0::/../x\n", {"cpu.max": "70000 100000\n"}, 0.7),
    "version 1": (V1, under("cpu,cpuacct/x", QUOTA), 3.0),
    "version 1, mounted by its name": (V1, under("cpu/x", QUOTA), 3.0),
    "version 1, a path of the host": (V1, under("cpu", QUOTA), 3.0),
    "version 1, no quota": (V1, under("cpu/x", QUOTA | {"cpu.cfs_quota_us": "-1\n"}), None),
    "hybrid, limited by version 1": (
        "2:cpu:/x\n0::/x\n",
        {"unified/x/cgroup.procs": "", **under("cpu/x", QUOTA)},
        3.0,
    ),
    "hybrid, limited by version 2": (
        "2:memory:/x\n0::/x\n",
        {"unified/x/cpu.max": "20000 10000\n", "x/cpu.max": "1 1\n"},
        2.0,
    ),
    "no files": ("0::/a\n2:cpu:/a\n", {}, None),
    "nonsense": ("0::/\n", {"cpu.max": "\n", "memory.max": "?\n"}, None),
}


@pytest.mark.parametrize("name", CPU)
def test_the_quota_is_the_least_of_all_control_groups(tmp_path: Path, name: str) -> None:
    groups, files, expected = CPU[name]
    assert limits_of(tmp_path, groups, files).cpu_quota == expected


def limits(**values: Any) -> MachineLimits:
    fields = dict.fromkeys(
        ("cpu_quota", "memory_total", "memory_available", "memory_limit", "memory_left")
    )
    return MachineLimits(**({"cores": 16, "cores_allowed": 8} | fields | values))


@pytest.mark.parametrize(
    ("cores", "quota", "threads"),
    [(8, None, 8), (8, 16.0, 8), (8, 8.0, 8), (8, 2.9, 2), (8, 0.25, 1), (1, 4.0, 1)],
)
def test_threads_are_the_whole_cores_that_affinity_and_quota_leave(
    cores: int, quota: float | None, threads: int
) -> None:
    assert limits(cores_allowed=cores, cpu_quota=quota).threads == threads


def test_kernels_and_pools_take_that_many_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads_of(**options: Any) -> list[int]:
        pools = config.resolve({"model": "m", "pools": "1p2d"} | options).pools
        assert pools is not None
        return [pools.decode.threads]

    if not native.available():
        pytest.skip("this build has no native kernels")
    monkeypatch.setattr(machine, "_cores_allowed", lambda: 7)
    for quota, alone, each in ((None, 7, 2), (6.5, 6, 2), (3.0, 3, 1), (0.5, 1, 1)):
        monkeypatch.setattr(machine, "_cpu_quota", lambda _root, quota=quota: quota)
        assert native.NativeOps().threads == alone
        assert threads_of() == [each]
        assert str(select.select_kernels("native")).endswith(f"{alone} thread{'s' * (alone > 1)}")
        assert native.NativeOps(2).threads == 2
        assert threads_of(threads=5) == [5]


# ── memory ───────────────────────────────────────────────────────────────────────────────────

MEMORY: dict[str, tuple[str, dict[str, str], int | None, int | None]] = {
    "version 2": ("0::/a\n", under("a", version_2("4000000000", 3 * GB, GB)), 4 * GB, 2 * GB),
    "version 2, of two groups the fuller": (
        "0::/a/b\n",
        under("a", version_2("8000000000", 7 * GB)) | under("a/b", version_2("4000000000", GB)),
        4 * GB,
        GB,
    ),
    "version 2, no limit of its own": (
        "0::/a/b\n",
        under("a", version_2("4000000000", GB)) | under("a/b", version_2("max", GB)),
        4 * GB,
        3 * GB,
    ),
    "version 2, nothing known of its use": (
        "0::/a\n",
        {"a/memory.max": "4000000000\n"},
        4 * GB,
        4 * GB,
    ),
    "version 2, over its limit": (
        "0::/a\n",
        under("a", version_2("4000000000", 5 * GB)),
        4 * GB,
        0,
    ),
    "version 2, from inside a container": ("0::/\n", version_2("2000000000", GB), 2 * GB, GB),
    "version 1": (
        V1,
        under("memory", version_1(UNLIMITED_V1.strip(), 9 * GB))
        | under("memory/x", version_1("2000000000", GB, GB // 4)),
        2 * GB,
        2 * GB - 3 * GB // 4,
    ),
    "version 1, a limit above what is mounted": (
        V1,
        under("memory", version_1(UNLIMITED_V1.strip(), GB, above="3000000000")),
        3 * GB,
        2 * GB,
    ),
    "hybrid": (
        "2:memory:/x\n0::/x\n",
        under("memory/x", version_1("2000000000", GB)) | {"unified/x/cgroup.procs": ""},
        2 * GB,
        GB,
    ),
    "no limit": ("0::/\n", version_2("max", GB), None, None),
    "no limit, as version 1 writes it": ("0::/\n", version_2(UNLIMITED_V1.strip(), GB), None, None),
    "a limit of all there is": ("0::/\n", version_2("16384000000", GB), None, None),
    "no files": ("0::/a\n2:memory:/a\n", {}, None, None),
}


@pytest.mark.parametrize("name", MEMORY)
def test_what_a_control_group_uses_is_not_free(tmp_path: Path, name: str) -> None:
    groups, files, limit, left = MEMORY[name]
    found = limits_of(tmp_path, groups, files)
    assert (found.memory_limit, found.memory_left) == (limit, left)
    assert (found.memory_total, found.memory_available) == (16_384_000_000, 8_192_000_000)
    assert found.memory_usable == (8_192_000_000 if left is None else left)


def test_a_full_machine_leaves_no_more_than_it_has() -> None:
    found = limits(memory_available=GB, memory_limit=9 * GB, memory_left=8 * GB)
    assert found.memory_usable == GB


def test_without_proc_and_sys_nothing_is_invented(tmp_path: Path) -> None:
    found = read_limits(tmp_path)
    assert (found.cpu_quota, found.memory_limit, found.memory_total) == (None, None, None)
    assert found.memory_usable is None
    assert found.threads == found.cores_allowed
    assert read_processor(tmp_path).features == ()


# ── the processor ────────────────────────────────────────────────────────────────────────────


def test_the_processor_is_read_from_its_first_entry(tmp_path: Path) -> None:
    entry = "model name\t: Fast 9000\nflags\t\t: fpu avx2 avx512_vnni avx2x\n\n"
    root = tree(tmp_path, {"proc/cpuinfo": entry + entry.replace("Fast", "Slow")})
    processor = read_processor(root)
    assert processor.name == "Fast 9000"
    assert processor.features == ("avx2", "avx512_vnni")
