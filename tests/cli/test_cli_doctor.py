from __future__ import annotations

import hashlib
import json
import re
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bifolio.checkpoint.builtin import BUILTIN, ModelWheel, builtin_path
from bifolio.cli import doctor
from bifolio.cli.main import app
from bifolio.machine import MachineLimits

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def short_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time reads of a small buffer: here nobody cares for the true rate."""
    monkeypatch.setattr(doctor, "PROBE_BYTES", 2**20)


def run(*arguments: str):
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_json_holds_the_facts_that_a_program_would_read() -> None:
    result = run("--json")
    found = json.loads(result.stdout)
    assert set(found) == {
        *("ok", "version", "python", "processor", "limits", "kernels", "packages", "compiler"),
        *("default_model", "hub_cache", "environment", "problems"),
    }
    assert found["ok"] is True
    assert result.exit_code == 0
    assert found["packages"]["torch"].startswith("2.")
    limits = found["limits"]
    assert 1 <= limits["threads"] <= limits["cores_allowed"] <= limits["cores"]
    assert {"memory_limit", "memory_left", "memory_usable", "cpu_quota"} <= set(limits)
    assert set(found["kernels"]) == {"native", "isa", "isas", "read_rate"}
    if found["kernels"]["native"]:
        assert found["kernels"]["isa"] in found["kernels"]["isas"]
        rate = found["kernels"]["read_rate"]
        assert rate is None or 1e6 < rate < 1e13  # bytes a second, of any machine
    for problem in found["problems"]:
        assert set(problem) == {"what", "hint", "fatal"}
        assert problem["hint"]


def test_a_missing_package_is_fatal_and_named_with_its_cure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", ("rich", "no-such-package"))
    result = run()
    assert result.exit_code == 1
    assert "missing packages: no-such-package" in result.stdout
    assert "hint: pip install no-such-package" in result.stdout
    assert "ready to serve" not in result.stdout


def test_a_torch_that_cannot_be_imported_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(module: str) -> None:
        raise OSError(f"lib{module}.so: cannot open shared object file")

    monkeypatch.setattr(doctor.importlib, "import_module", fail)
    found = doctor.examine()
    assert not found.ok
    assert "libtorch.so" in found.problems[0].what


def test_an_instruction_set_that_cannot_be_forced_is_fatal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not doctor.examine().kernels.native:
        pytest.skip("this build has no native kernels")
    monkeypatch.setenv("BIFOLIO_ISA", "mmx")
    found = doctor.examine()
    assert not found.ok
    assert "mmx" in found.problems[0].what
    assert found.problems[0].hint == "unset BIFOLIO_ISA"


def test_the_packages_looked_for_are_those_that_the_project_needs() -> None:
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[<>=;\s]", need)[0] for need in needs}
    assert set(doctor.PACKAGES) == names


@pytest.fixture
def model_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the default model belongs, in a home of its own; its digest is that of b"whole"."""
    monkeypatch.setenv("BIFOLIO_HOME", str(tmp_path))
    wheel = ModelWheel("r", "folder/model.gguf", hashlib.sha256(b"whole").hexdigest(), 5)
    monkeypatch.setitem(BUILTIN, "smollm2-135m", wheel)
    path = builtin_path("smollm2-135m")
    path.parent.mkdir(parents=True)
    return path


def test_a_model_that_is_not_there_yet_is_no_problem(model_path: Path) -> None:
    found = doctor.examine()
    assert (found.default_model.present, found.default_model.intact) == (False, None)
    assert found.default_model.path == str(model_path)
    assert not [p for p in found.problems if "model" in p.what]


@pytest.mark.parametrize(("content", "intact"), [(b"whole", True), (b"half", False)])
def test_the_digest_of_the_default_model_is_checked(
    model_path: Path, content: bytes, intact: bool
) -> None:
    model_path.write_bytes(content)
    found = doctor.examine()
    assert (found.default_model.present, found.default_model.intact) == (True, intact)
    hints = [p.hint for p in found.problems if "digest" in p.what]
    assert hints == ([] if intact else [f"rm '{model_path}'"])


def limits(**values: float | int | None) -> MachineLimits:
    base = {
        "cores": 8,
        "cores_allowed": 8,
        "cpu_quota": None,
        "memory_total": 64 * 2**30,
        "memory_available": 32 * 2**30,
        "memory_limit": None,
        "memory_left": None,
    }
    return MachineLimits(**(base | values))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "hints"),
    [
        (limits(), []),
        (limits(cpu_quota=8.0), []),
        (limits(cpu_quota=0.5), []),
        (limits(memory_left=2**29), ["serve with a smaller --cache-memory, e.g. 256MiB"]),
        (limits(memory_limit=2**29), ["serve with a smaller --cache-memory, e.g. 256MiB"]),
        (limits(memory_available=2**29), ["serve with a smaller --cache-memory, e.g. 256MiB"]),
        (limits(memory_available=None, memory_total=None), []),
    ],
)
def test_tight_limits_are_pointed_out(found: MachineLimits, hints: list[str]) -> None:
    assert [problem.hint for problem in doctor._limit_problems(found)] == hints


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        (limits(cores_allowed=4), ["4 of 8; 4 threads by default", "32.0 GiB free of 64.0 GiB"]),
        (
            limits(cpu_quota=2.5, memory_limit=2**32, memory_left=2**30),
            [
                "8 of 8, quota of the control group: 2.5 cores; 2 threads by default",
                "limited to 4.0 GiB by the control group, which has 1.0 GiB left",
            ],
        ),
        (limits(cpu_quota=0.2), ["quota of the control group: 0.2 cores; 1 thread by default"]),
    ],
)
def test_what_a_process_may_use_is_shown(
    found: MachineLimits, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "read_limits", lambda: found)
    monkeypatch.setenv("COLUMNS", "200")
    shown = run().stdout
    for line in lines:
        assert line in shown
