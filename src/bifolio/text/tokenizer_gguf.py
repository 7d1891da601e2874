"""A tokenizer rebuilt from the metadata of a GGUF file.

Two kinds: `gpt2` (byte-level BPE; the file names the rule that splits text into words, but does
not hold it, so the rules are here) and `llama` (SentencePiece BPE with byte fallback; the file
holds scores, from which the order of merges follows).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from bifolio.checkpoint.token_ids import TokenType
from bifolio.errors import CheckpointError, UnsupportedError
from bifolio.spec.fields import Fields
from bifolio.spec.gguf_tokens import END_KEYS, end_token_ids, token_ids
from bifolio.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")

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
    fields = Fields(metadata, "the GGUF file")
    tokens = fields.texts(_key("tokens"))
    kind = fields.text(_key("model"))
    _check_ids(fields, tokens)
    ids = {name: next(iter(token_ids(fields, key)), None) for name, key in _NAMED_KEYS.items()}
    match kind:
        case "gpt2":
            backend, add_bos = _byte_level_bpe(fields, tokens)
        case "llama":
            backend, add_bos = _sentencepiece_bpe(fields, tokens, ids["unk_token"]), True
        case _:
            raise UnsupportedError(
                f"tokenizer.ggml.model {kind!r} is not supported; 'gpt2' and 'llama' are. "
                "Use the model's safetensors checkpoint with its tokenizer.json"
            )
    _add_tokens(backend, tokens, fields)
    bos, eos = ids["bos_token"], ids["eos_token"]
    return Tokenizer(
        backend,
        named={name: tokens[i] for name, i in ids.items() if i is not None},
        stop_ids=end_token_ids(fields),
        prefix=[bos] if bos is not None and fields.flag(_key("add_bos_token"), add_bos) else [],
        suffix=[eos] if eos is not None and fields.flag(_key("add_eos_token"), False) else [],
    )


def _key(name: str) -> str:
    return f"tokenizer.ggml.{name}"


def _check_ids(fields: Fields, tokens: Sequence[str]) -> None:
    """CheckpointError if a named token is none of the tokens; a warning if there is to be none."""
    for name in sorted({*_NAMED_KEYS.values(), *END_KEYS}):
        ids = token_ids(fields, name)
        if _key(name) in fields and not ids:
            logger.warning("the GGUF file: %s says that there is no such token", _key(name))
        for i in ids:
            if i >= len(tokens):
                raise CheckpointError(
                    f"the GGUF file: {_key(name)} is {i}, but it has {len(tokens)} tokens"
                )


def _byte_level_bpe(fields: Fields, tokens: list[str]) -> tuple[Backend, bool]:
    """The tokenizer, and whether its kind starts a prompt with BOS when the file does not say."""
    rule = fields.text(_key("pre"), "default")
    words: pre_tokenizers.PreTokenizer
    normalizer = None
    is_llama3 = False
    match rule:
        case "default" | "gpt-2" | "gpt2":
            if rule == "default":
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
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [_pair(merge, vocab) for merge in fields.texts(_key("merges"))]
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


def _pair(merge: str, vocab: Collection[str]) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise CheckpointError(f"tokenizer.ggml.merges: {merge!r} is not a pair")
    for part in (left, right, left + right):
        if part not in vocab:
            raise CheckpointError(f"tokenizer.ggml.merges: {part!r} of {merge!r} is no token")
    return left, right


def _sentencepiece_bpe(fields: Fields, tokens: list[str], unknown: int | None) -> Backend:
    """SentencePiece merges the neighbours whose union scores highest; so merges rank by score."""
    scores = fields.numbers(_key("scores"))
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
    backend = Backend(
        models.BPE(
            vocab=vocab,
            merges=[pair for _, _, pair in ranked],
            unk_token=tokens[unknown] if unknown is not None else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = fields.flag(_key("add_space_prefix"), True)
    prepend: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefixed else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip: list[decoders.Decoder] = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _add_tokens(backend: Backend, tokens: list[str], fields: Fields) -> None:
    if _key("token_type") not in fields:
        return
    types = fields.numbers(_key("token_type"))
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
