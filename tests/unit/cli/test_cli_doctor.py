from __future__ import annotations

import hashlib
import json
import re
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bifolio.cli import checkup
from bifolio.cli.machine import Limits, read_limits, read_processor
from bifolio.cli.main import app
from bifolio.models.builtin import BUILTIN, Wheel, builtin_path

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def short_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time reads of a small buffer: here nobody cares for the true rate."""
    monkeypatch.setattr(checkup, "PROBE_BYTES", 2**20)


def doctor(*arguments: str):
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_json_holds_the_facts_that_a_program_would_read() -> None:
    result = doctor("--json")
    found = json.loads(result.stdout)
    assert set(found) == {
        *("ok", "version", "python", "processor", "limits", "kernels", "packages", "compiler"),
        *("default_model", "hub_cache", "environment", "problems"),
    }
    assert found["ok"] is True
    assert result.exit_code == 0
    assert found["packages"]["torch"].startswith("2.")
    assert 1 <= found["limits"]["cores_allowed"] <= found["limits"]["cores"]
    assert set(found["kernels"]) == {"native", "isa", "isas", "read_rate"}
    if found["kernels"]["native"]:
        assert found["kernels"]["isa"] in found["kernels"]["isas"]
        rate = found["kernels"]["read_rate"]
        assert rate is None or 1e6 < rate < 1e13  # bytes a second, of any machine
    for problem in found["problems"]:
        assert set(problem) == {"what", "cure", "fatal"}
        assert problem["cure"]


def test_a_missing_package_is_fatal_and_named_with_its_cure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkup, "PACKAGES", ("rich", "no-such-package"))
    result = doctor()
    assert result.exit_code == 1
    assert "missing packages: no-such-package" in result.stdout
    assert "cure: pip install no-such-package" in result.stdout
    assert "ready to serve" not in result.stdout


def test_a_torch_that_cannot_be_imported_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(module: str) -> None:
        raise OSError(f"lib{module}.so: cannot open shared object file")

    monkeypatch.setattr(checkup.importlib, "import_module", fail)
    found = checkup.examine()
    assert not found.ok
    assert "libtorch.so" in found.problems[0].what


def test_an_instruction_set_that_cannot_be_forced_is_fatal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not checkup.examine().kernels.native:
        pytest.skip("this build has no native kernels")
    monkeypatch.setenv("BIFOLIO_ISA", "mmx")
    found = checkup.examine()
    assert not found.ok
    assert "mmx" in found.problems[0].what
    assert found.problems[0].cure == "unset BIFOLIO_ISA"


def test_the_packages_looked_for_are_those_that_the_project_needs() -> None:
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[<>=;\s]", need)[0] for need in needs}
    assert set(checkup.PACKAGES) == names


@pytest.fixture
def model_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the default model belongs, in a home of its own; its digest is that of b"whole"."""
    monkeypatch.setenv("BIFOLIO_HOME", str(tmp_path))
    wheel = Wheel("r", "folder/model.gguf", hashlib.sha256(b"whole").hexdigest(), 5)
    monkeypatch.setitem(BUILTIN, "smollm2-135m", wheel)
    path = builtin_path("smollm2-135m")
    path.parent.mkdir(parents=True)
    return path


def test_a_model_that_is_not_there_yet_is_no_problem(model_path: Path) -> None:
    found = checkup.examine()
    assert (found.default_model.present, found.default_model.intact) == (False, None)
    assert found.default_model.path == str(model_path)
    assert not [p for p in found.problems if "model" in p.what]


@pytest.mark.parametrize(("content", "intact"), [(b"whole", True), (b"half", False)])
def test_the_digest_of_the_default_model_is_checked(
    model_path: Path, content: bytes, intact: bool
) -> None:
    model_path.write_bytes(content)
    found = checkup.examine()
    assert (found.default_model.present, found.default_model.intact) == (True, intact)
    cures = [p.cure for p in found.problems if "digest" in p.what]
    assert cures == ([] if intact else [f"rm '{model_path}'"])


def limits(**values: float | int | None) -> Limits:
    base = {
        "cores": 8,
        "cores_allowed": 8,
        "cpu_quota": None,
        "memory_total": 64 * 2**30,
        "memory_available": 32 * 2**30,
        "memory_limit": None,
    }
    return Limits(**(base | values))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "cures"),
    [
        (limits(), []),
        (limits(cpu_quota=8.0), []),
        (limits(cpu_quota=2.5), ["serve with --threads 2"]),
        (limits(cpu_quota=0.5), ["serve with --threads 1"]),
        (limits(memory_limit=2**29), ["serve with a smaller --cache-memory, e.g. 256MiB"]),
        (limits(memory_available=2**29), ["serve with a smaller --cache-memory, e.g. 256MiB"]),
        (limits(memory_available=None, memory_total=None), []),
    ],
)
def test_tight_limits_are_pointed_out(found: Limits, cures: list[str]) -> None:
    assert [problem.cure for problem in checkup._limit_problems(found)] == cures


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


MEMINFO = "MemTotal:       16000000 kB\nMemFree:  5 kB\nMemAvailable:    8000000 kB\n"
UNLIMITED_V1 = "9223372036854771712\n"


def test_limits_of_control_groups_version_2_are_the_tightest_of_all_parents(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/a/memory.max": "4000000000\n",
            "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
        },
    )
    found = read_limits(root)
    assert found.cpu_quota == 1.5
    assert found.memory_limit == 4_000_000_000
    assert (found.memory_total, found.memory_available) == (16_384_000_000, 8_192_000_000)
    assert found.memory_usable == 4_000_000_000


def test_limits_of_control_groups_version_1(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/x\n1:name=systemd:/\n",
            "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED_V1,
            "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "2000000000\n",
        },
    )
    found = read_limits(root)
    assert (found.cpu_quota, found.memory_limit) == (3.0, 2_000_000_000)


def test_in_a_container_the_mount_itself_holds_the_limits(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/docker/of/the/host\n",
            "sys/fs/cgroup/cpu.max": "50000 100000\n",
            "sys/fs/cgroup/memory.max": "1000000\n",
        },
    )
    found = read_limits(root)
    assert (found.cpu_quota, found.memory_limit) == (0.5, 1_000_000)


@pytest.mark.parametrize("limit", ["max\n", UNLIMITED_V1, "16384000000\n"])
def test_a_limit_that_limits_nothing_is_none(tmp_path: Path, limit: str) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": limit,
            "sys/fs/cgroup/cpu.max": "max 100000\n",
        },
    )
    found = read_limits(root)
    assert (found.cpu_quota, found.memory_limit) == (None, None)
    assert found.memory_usable == 8_192_000_000


def test_without_proc_and_sys_nothing_is_invented(tmp_path: Path) -> None:
    found = read_limits(tmp_path)
    assert (found.cpu_quota, found.memory_limit, found.memory_total) == (None, None, None)
    assert found.memory_usable is None
    assert read_processor(tmp_path).features == ()


def test_the_processor_is_read_from_its_first_entry(tmp_path: Path) -> None:
    entry = "model name\t: Fast 9000\nflags\t\t: fpu avx2 avx512_vnni avx2x\n\n"
    root = tree(tmp_path, {"proc/cpuinfo": entry + entry.replace("Fast", "Slow")})
    processor = read_processor(root)
    assert processor.name == "Fast 9000"
    assert processor.features == ("avx2", "avx512_vnni")
