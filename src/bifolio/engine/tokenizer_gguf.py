"""A tokenizer rebuilt from the metadata of a GGUF file.

Two kinds: `gpt2` (byte-level BPE; the file names the rule that splits text into words, but does
not hold it, so the rules are here) and `llama` (SentencePiece BPE with byte fallback; the file
holds scores, from which the order of merges follows).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from bifolio.engine.tokenizer import Tokenizer
from bifolio.errors import CheckpointError, UnsupportedError

logger = logging.getLogger(__name__)


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")

_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_NAMED_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that the keys `tokenizer.ggml.…` describe.

    CheckpointError names a key that is missing or has the wrong length; UnsupportedError a kind
    or a splitting rule that we do not know.
    """
    fields = _Fields(metadata)
    tokens: list[str] = fields.need("tokens")
    kind: str = fields.need("model")
    match kind:
        case "gpt2":
            backend, add_bos = _byte_level_bpe(fields, tokens)
        case "llama":
            backend, add_bos = _sentencepiece_bpe(fields, tokens), True
        case _:
            raise UnsupportedError(
                f"tokenizer.ggml.model {kind!r} is not supported; 'gpt2' and 'llama' are. "
                "Use the model's safetensors checkpoint with its tokenizer.json"
            )
    _add_tokens(backend, tokens, fields.get("token_type", [TokenType.NORMAL] * len(tokens)))
    ids = {name: fields.get(key) for name, key in _NAMED_KEYS.items()}
    named = {name: tokens[i] for name, i in ids.items() if i is not None}
    bos, eos = ids["bos_token"], ids["eos_token"]
    return Tokenizer(
        backend,
        named=named,
        stop_ids=[i for key in _STOP_KEYS if (i := fields.get(key)) is not None],
        prefix=[bos] if bos is not None and fields.get("add_bos_token", add_bos) else [],
        suffix=[eos] if eos is not None and fields.get("add_eos_token", False) else [],
    )


class _Fields:
    """The keys below `tokenizer.ggml.`."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"the GGUF file has no tokenizer.ggml.{key}")
        return value


def _byte_level_bpe(fields: _Fields, tokens: list[str]) -> tuple[Backend, bool]:
    """The tokenizer, and whether its kind starts a prompt with BOS when the file does not say."""
    rule = fields.get("pre")
    words: pre_tokenizers.PreTokenizer
    normalizer = None
    is_llama3 = False
    match rule:
        case None | "default" | "gpt-2" | "gpt2":
            if rule in (None, "default"):
                logger.warning("the GGUF file names no splitting rule for text; taking GPT-2's")
            words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        case "smollm" | "starcoder" | "refact" | "command-r" | "codeshell":
            words = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            )
        case "llama-bpe" | "llama3" | "llama-v3":
            words, is_llama3 = _split_words(_LLAMA3_WORDS), True
        case "qwen2" | "deepseek-r1-qwen":
            words, normalizer = _split_words(_QWEN2_WORDS), normalizers.NFC()
        case _:
            raise UnsupportedError(
                f"tokenizer.ggml.pre {rule!r} is not supported; gpt-2, smollm, llama-bpe, qwen2 "
                "and their aliases are. Use the model's safetensors checkpoint"
            )
    merges = [_pair(merge) for merge in fields.need("merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=is_llama3))
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = words
    backend.decoder = decoders.ByteLevel()
    return backend, is_llama3


def _split_words(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise CheckpointError(f"tokenizer.ggml.merges: {merge!r} is not a pair")
    return left, right


def _sentencepiece_bpe(fields: _Fields, tokens: list[str]) -> Backend:
    """SentencePiece merges the neighbours whose union scores highest; so merges rank by score."""
    scores: list[float] = fields.need("scores")
    if len(scores) != len(tokens):
        raise CheckpointError(
            f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens"
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    ranked: list[tuple[float, int, tuple[str, str]]] = []
    for token, i in vocab.items():
        for cut in range(1, len(token)):
            pair = token[:cut], token[cut:]
            if pair[0] in vocab and pair[1] in vocab:
                ranked.append((-scores[i], i, pair))
    ranked.sort()
    unknown = fields.get("unknown_token_id")
    backend = Backend(
        models.BPE(
            vocab=vocab,
            merges=[pair for _, _, pair in ranked],
            unk_token=tokens[unknown] if unknown is not None else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = fields.get("add_space_prefix", True)
    prepend: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefixed else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip: list[decoders.Decoder] = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _add_tokens(backend: Backend, tokens: list[str], types: list[int]) -> None:
    if len(types) != len(tokens):
        raise CheckpointError(
            f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    control = (TokenType.CONTROL, TokenType.UNKNOWN)
    pairs = list(zip(tokens, types, strict=True))
    backend.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, kind in pairs if kind in control]
    )
    backend.add_tokens(
        [AddedToken(t, normalized=False) for t, kind in pairs if kind == TokenType.USER_DEFINED]
    )
