"""The ids with a token are those that the tokenizer itself knows, read without building it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from bifolio.checkpoint.source import ModelSource
from bifolio.checkpoint.token_ids import TokenIds, TokenType, token_ids
from bifolio.errors import CheckpointError
from bifolio.text.tokenizer_files import tokenizer_from_folder
from bifolio.text.tokenizer_gguf import tokenizer_from_gguf
from support.text import byte_backend, byte_pictures
from support.tiny import tiny_config

ROWS = 512


def byte_level(vocab: dict[str, int]) -> Backend:
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return backend


def unigram() -> Backend:
    backend = Backend(models.Unigram([("<unk>", 0.0), ("▁", -2.0), ("a", -3.0)], unk_id=0))
    backend.decoder = decoders.Metaspace()
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    return backend


def with_added(backend: Backend, ids: dict[str, int]) -> Backend:
    """Its file says that tokens were added with these ids, whatever the package makes of it."""
    settings = json.loads(backend.to_str())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    settings["added_tokens"] += [
        {"id": i, "content": name, "special": True, **flags} for name, i in ids.items()
    ]
    return cast("Backend", SimpleNamespace(to_str=lambda: json.dumps(settings)))


HOLES = byte_pictures() | {"hello": 300, "world": 402}
BACKENDS = {
    "words behind a gap": (byte_backend(["hello", "there"]), {}),
    "holes": (byte_level(HOLES), {}),
    "added": (with_added(byte_level(byte_pictures()), {"<x>": 256, "<y>": 257}), {}),
    "added, numbered otherwise": (
        with_added(byte_level(byte_pictures()), {"<x>": 300, "a": 65, "<y>": 400}),
        {},
    ),
    "added over holes": (with_added(byte_level(HOLES), {"hello": 300, "<x>": 403}), {}),
    "unigram": (unigram(), {}),
    "declared": (
        byte_level(byte_pictures()),
        {"added_tokens_decoder": {"256": {"content": "<z>", "special": True}}},
    ),
    "beyond the rows": (byte_level(byte_pictures() | {"far": 600}), {}),
}


def folder_of(path: Path, tokenizer: str, settings: dict[str, Any] | None = None) -> ModelSource:
    (path / "config.json").write_text(json.dumps(tiny_config("llama", vocab_size=ROWS)))
    (path / "tokenizer.json").write_text(tokenizer)
    (path / "tokenizer_config.json").write_text(json.dumps(settings or {}))
    return ModelSource("m", path)


@pytest.mark.parametrize("name", BACKENDS)
def test_they_are_those_of_the_tokenizer_of_a_folder(tmp_path: Path, name: str) -> None:
    backend, settings = BACKENDS[name]
    found = token_ids(folder_of(tmp_path, backend.to_str(), settings))
    tokenizer = tokenizer_from_folder(tmp_path)
    assert [i for i in range(ROWS) if i in found] == [
        i for i in range(ROWS) if tokenizer.token_text(i)
    ]
    assert len(found) == sum(i in found for i in range(ROWS))


def gguf_source(**entries: Any) -> ModelSource:
    metadata = {f"tokenizer.ggml.{key}": value for key, value in entries.items()}
    source = SimpleNamespace(is_gguf=True, gguf=SimpleNamespace(metadata=metadata))
    source.spec = SimpleNamespace(vocab=len(entries.get("tokens", "")) + 8)
    return cast("ModelSource", source)


def test_of_a_gguf_file_they_are_its_tokens_but_for_unused_ones() -> None:
    pictures = sorted(byte_pictures(), key=byte_pictures().__getitem__)
    names = [*pictures, "[PAD256]", "<|end|>", "[PAD258]"]
    types = [TokenType.NORMAL] * 256 + [TokenType.UNUSED, TokenType.CONTROL, TokenType.UNUSED]
    source = gguf_source(
        model="gpt2", tokens=names, token_type=list(map(int, types)), merges=[], pre="gpt-2"
    )
    assert token_ids(source) == TokenIds(258, holes=(256,))
    tokenizer = tokenizer_from_gguf(source.gguf.metadata)
    assert all(tokenizer.token_text(i) for i in range(256))
    assert token_ids(gguf_source(model="gpt2", tokens=names)) == TokenIds(259)


def test_a_name_that_stands_twice_in_a_gguf_file_is_the_later_token() -> None:
    assert token_ids(gguf_source(tokens=["a", "b", "a", "c"])) == TokenIds(4, holes=(0,))


def test_without_a_tokenizer_every_row_counts(tmp_path: Path) -> None:
    source = folder_of(tmp_path, "{}")
    assert token_ids(source) == TokenIds(ROWS)
    (tmp_path / "tokenizer.json").unlink()
    assert token_ids(ModelSource("m", tmp_path)) == TokenIds(ROWS)
    assert token_ids(gguf_source()) == TokenIds(8)


@pytest.mark.parametrize(
    "model", [[], {"vocab": "a"}, {"vocab": {"a": "b"}}, {"vocab": [1]}, {"vocab": [[]]}]
)
def test_a_vocabulary_of_another_type_is_named(tmp_path: Path, model: Any) -> None:
    source = folder_of(tmp_path, json.dumps({"model": model or 7}))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: model"):
        token_ids(source)


def test_the_smollm2_file_has_a_token_for_every_row(smollm2: ModelSource) -> None:
    assert token_ids(smollm2) == TokenIds(49152)
