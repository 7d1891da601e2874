"""Which rows of a model's vocabulary have a token.

Embeddings are often padded to a round size, and some vocabularies have holes. The tokenizer has no
text for such an id, so it must not come out of a model. What counts is the ids that the tokenizer
gives, which tests compare; they are read here without building one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from typing import Any, Self

from bifolio.checkpoint.source import ModelSource
from bifolio.errors import CheckpointError
from bifolio.spec.fields import Fields


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Ids with a token are those below `end`, but for `holes`, which rise."""

    end: int
    holes: tuple[int, ...] = ()

    @classmethod
    def of(cls, known: Iterable[int], vocab: int) -> Self:
        """Of the known ids, those below `vocab`, which is the number of the model's rows."""
        ids = {i for i in known if i < vocab}
        end = max(ids, default=-1) + 1
        return cls(end, tuple(sorted(ids.symmetric_difference(range(end)))))

    def __len__(self) -> int:
        return self.end - len(self.holes)

    def __contains__(self, token: int) -> bool:
        return 0 <= token < self.end and token not in self.holes


def token_ids(source: ModelSource) -> TokenIds:
    """The ids with a token; all of the model's where its source has no tokenizer.

    CheckpointError names the part of the tokenizer that cannot be read.
    """
    known = _of_gguf(source) if source.is_gguf else _of_folder(source)
    vocab = source.spec.vocab
    return TokenIds.of(known, vocab) if known else TokenIds(vocab)


def _of_gguf(source: ModelSource) -> set[int]:
    """Converters fill a vocabulary up with tokens of type UNUSED, such as `[PAD151665]`."""
    fields = Fields(source.gguf.metadata, "the GGUF file")
    names, kinds = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
    if names not in fields:
        return set()
    known = set({token: i for i, token in enumerate(fields.texts(names))}.values())
    if kinds not in fields:
        return known
    types = fields.numbers(kinds)
    return {i for i in known if i >= len(types) or types[i] != TokenType.UNUSED}


def _of_folder(source: ModelSource) -> set[int]:
    """The package numbers added tokens itself, after the vocabulary, and ignores the file's ids."""
    tokenizer = source.tokenizer
    vocab = _vocabulary(tokenizer)
    if not vocab:
        return set()
    known, free = set(vocab.values()), count(len(vocab))
    added = Fields(tokenizer, "tokenizer.json").parts("added_tokens")
    for name in dict.fromkeys(entry.text("content") for entry in added):
        if name not in vocab:
            known.add(next(free))
    declared = Fields(source.tokenizer_config, "tokenizer_config.json").part("added_tokens_decoder")
    return known.union(int(key) for key in filter(str.isdecimal, declared.keys()))


def _vocabulary(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Ids by name. A list of names with scores (Unigram) is in the order of the ids."""
    model = tokenizer.get("model") or {}
    vocab = (model.get("vocab") or {}) if isinstance(model, dict) else None
    if isinstance(vocab, list) and all(isinstance(item, list) and item for item in vocab):
        vocab = {item[0]: i for i, item in enumerate(vocab) if isinstance(item[0], str)}
    if not isinstance(vocab, dict) or not all(type(i) is int for i in vocab.values()):
        raise CheckpointError(
            "tokenizer.json: model.vocab is neither an object of ids nor a list of scored tokens"
        )
    return vocab
