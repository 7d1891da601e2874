"""A place that cannot be written is refused before anything is computed."""

import os

import pytest
from typer.testing import CliRunner

from bifolio.cli.main import app
from bifolio.cli.output_paths import writable_file, writable_folder
from bifolio.errors import ConfigError


def test_a_folder_that_is_there_or_can_be_made_is_taken_and_not_made_yet(tmp_path):
    assert writable_folder(None) is None
    assert writable_folder(tmp_path) == tmp_path
    assert writable_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert list(tmp_path.iterdir()) == []


def test_a_file_a_path_below_a_file_and_a_dangling_link_are_no_folders(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "file/below", "link"):
        with pytest.raises(ConfigError, match="is no folder"):
            writable_folder(tmp_path / name)


def test_a_file_needs_a_folder_and_is_none_itself(tmp_path):
    assert writable_file(tmp_path / "page.md") == tmp_path / "page.md"
    with pytest.raises(ConfigError, match="there is no folder"):
        writable_file(tmp_path / "missing" / "page.md")
    with pytest.raises(ConfigError, match="is a folder"):
        writable_file(tmp_path)


def test_a_page_is_not_written_to_a_pipe_that_may_have_no_reader(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for option in ("--out", "--markdown"):
        result = CliRunner().invoke(app, ["report", str(tmp_path), option, str(tmp_path / "pipe")])
        assert result.exit_code == 2
        assert "is a pipe, which may have no reader" in result.stderr


@pytest.mark.parametrize("command", ["distance", "tasks"])
def test_an_evaluation_is_not_begun_whose_results_have_no_place(command, tmp_path):
    (tmp_path / "file").write_text("mine")
    options = ["eval", command, "-m", "no-such-model", "--candidate", "bf16/fp8"]
    result = CliRunner().invoke(app, [*options, "--out", str(tmp_path / "file")])
    assert result.exit_code == 2
    assert "is no folder" in result.output + result.stderr


@pytest.mark.parametrize(
    "options",
    [
        ("plan", "-m", "smollm2-135m", "--trace"),
        ("bench", "--trace"),
        ("bench", "compare", "bf16/bf16", "bf16/fp8", "--trace"),
        ("calibrate", "folder", "--data"),
        ("compress", "folder", "target", "--calibration"),
        ("eval", "tasks", "--candidate", "bf16/fp8", "--tasks"),
        ("eval", "gate", "--candidate", "bf16/fp8", "--margin", "0.1", "--tasks"),
        ("eval", "distance", "--candidate", "bf16/fp8"),
        ("serve", "smollm2-135m", "--config"),
        ("cluster", "up"),
    ],
)
def test_no_command_reads_from_a_device_or_waits_for_a_pipe(options, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("/dev/zero", str(tmp_path / "pipe"), str(tmp_path)):
        result = CliRunner().invoke(app, [*options, name])
        assert result.exit_code == 2
        assert f"{name} is a folder, a device or a pipe; name a plain file" in result.stderr
