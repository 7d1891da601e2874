"""`tools/bootstrap.py` shows that it goes on while it installs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[1] / "tools" / "bootstrap.py"


@pytest.fixture
def bootstrap() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap_under_test", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_shows_signs_of_life_and_passes_on_how_it_ended(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap, "LIFE_SECONDS", 0.05)
    code = "import time; time.sleep(0.5); raise SystemExit(3)"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        assert bootstrap.watch(process) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert all(line.startswith("  … ") for line in lines)


def test_it_counts_the_files_compiled_since_it_began(bootstrap: ModuleType, tmp_path: Path) -> None:
    build = tmp_path / "cp311-cp311-linux"
    build.mkdir()
    names = ("old.cpp.o", "new.cpp.o", "next.cpp.o")
    (build / "build.ninja").write_text("".join(f"build {n}: CXX {n[:-2]}\n" for n in names))
    os.utime(build / "build.ninja", (2000, 2000))
    assert bootstrap.compiled(tmp_path, 1500) == ""
    for name, when in (("old.cpp.o", 1000), ("new.cpp.o", 2001)):
        (build / name).touch()
        os.utime(build / name, (when, when))
    assert bootstrap.compiled(tmp_path, 1500) == "1 of 3 files compiled"
    assert bootstrap.compiled(tmp_path, 3000) == ""
