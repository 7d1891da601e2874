"""Text to token ids and back, with special tokens under our own control.

The vocabulary, the merges and the splitting of plain text are the `tokenizers` package's. Special
tokens (`<|im_end|>`, BOS, …) are found by us, before it sees the text, because only we know who
wrote them. A chat template may write a special token; a user may not: `<|im_end|>` in a message
must stay ten characters, or whoever writes a message could end it and speak as the system.

The chat template does its part by giving stand-ins for characters that came from outside (see
`control_texts`). `encode` then looks for special tokens, which a stand-in hides, puts the
characters back, and gives everything between the special tokens to the package with the
recognition of special tokens switched off. The same is done for other added tokens that the
template uses as marks (`reserve`).
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import tokenizers
import tokenizers.models
from tokenizers import AddedToken

from bifolio.errors import ConfigError
from bifolio.text.control_texts import any_of, put_back

_WORD_MARK = "▁"
"""SentencePiece's picture of a space."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """One model's tokenizer.

    `named` maps `bos_token`, `eos_token`, … to their texts, as templates expect them. `stop_ids`
    are the end tokens of its files and of the chat template. `prefix` and `suffix` are the ids
    that the tokenizer adds around a plain prompt (usually BOS before it, or nothing).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named: Mapping[str, str],
        stop_ids: Iterable[int] = (),
        prefix: Sequence[int] | None = None,
        suffix: Sequence[int] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        added = backend.get_added_tokens_decoder()
        decoder = _parts(_settings(backend.decoder))
        self._backend = backend
        self._later = _continuing(backend) or backend
        self._controls = {token.content: i for i, token in added.items() if token.special}
        self._added = {i: token.content for i, token in added.items()}
        self._pattern = any_of(self._controls)
        self._left_strippers = {token.content for token in added.values() if token.lstrip}
        self._right_strippers = {token.content for token in added.values() if token.rstrip}
        self._byte_level = _is_byte_level(decoder)
        self._strips_space = _strips_first_space(decoder)
        self._bytes: dict[int, bytes] = {}
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        self._token_chars = max(map(len, vocab)) * _shrinkage(_settings(backend.normalizer))
        if self._left_strippers or self._right_strippers or _fuses_unknown(backend.model):
            self._token_chars = math.inf
        self.special_ids = frozenset(self._controls.values())
        self._control_ids = set(self.special_ids)
        self.named = dict(named)
        self.stop_ids: frozenset[int] = frozenset(stop_ids)
        self.bos_id = backend.token_to_id(named["bos_token"]) if "bos_token" in named else None
        around = _around(backend)
        self.prefix = tuple(around[0] if prefix is None else prefix)
        self.suffix = tuple(around[1] if suffix is None else suffix)

    @property
    def special_texts(self) -> Collection[str]:
        """How the special tokens are spelled."""
        return [self._added[i] for i in self.special_ids]

    def holds_special(self, text: str) -> bool:
        """Whether the text of a special token is in it."""
        return any(special in text for special in self.special_texts)

    @property
    def added_texts(self) -> Collection[str]:
        """How the added tokens that are not special are spelled."""
        return [text for i, text in self._added.items() if i not in self.special_ids]

    def reserve(self, marks: Iterable[str]) -> None:
        """Hide these added tokens, too, where a stand-in is inside. They do not become special."""
        added = {text: i for i, text in self._added.items()}
        self._controls |= {text: added[text] for text in marks}
        self._control_ids = set(self._controls.values())
        self._pattern = any_of(self._controls)
        tokens = [AddedToken(text, special=True, normalized=False) for text in marks]
        for backend in (self._backend, self._later):
            backend.add_special_tokens(tokens)  # that we find them, not the package

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = False,
        guard: Mapping[str, str] | None = None,
    ) -> list[int]:
        """Token ids of a text; special tokens in it count as such unless a stand-in is inside.

        `add_special_tokens` puts the tokenizer's prefix and suffix around it: right for a plain
        prompt, wrong for a rendered template, which writes its own. `guard` maps stand-ins to the
        texts that replace them after the special tokens were found.
        """
        guard = guard or {}
        ids = list(self.prefix) if add_special_tokens else []
        start = 0
        for match in self._pattern.finditer(text):
            found, end = match.group(), match.start()
            if end < start:  # the token before swallowed the space that this one begins with
                continue
            if found in self._left_strippers:
                while end > start and text[end - 1].isspace():
                    end -= 1
            ids += self._plain(text, start, end, guard)
            ids.append(self._controls[found])
            start = match.end()
            if found in self._right_strippers:
                while start < len(text) and text[start].isspace():
                    start += 1
        ids += self._plain(text, start, len(text), guard)
        if add_special_tokens:
            ids += self.suffix
        return ids

    def most_chars(self, tokens: int) -> float:
        """The most characters that a text of `tokens` tokens can have; infinite where unknown."""
        return tokens * self._token_chars

    def starts_with_two_bos(self, ids: Sequence[int]) -> bool:
        """Whether BOS was written twice, by a template or user and by the tokenizer."""
        return self.bos_id is not None and list(ids[:2]) == [self.bos_id, self.bos_id]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Text of a whole sequence of ids; what is not UTF-8 becomes U+FFFD."""
        skip = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join(self.token_bytes(i) for i in ids if i not in skip).decode(errors="replace")
        return text.removeprefix(" ") if self._strips_space else text

    def token_bytes(self, token: int) -> bytes:
        """Bytes that a token stands for; none for an id that the tokenizer does not know."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._compute_bytes(token)
        return found

    def token_text(self, token: int) -> str:
        """A token by its name in the vocabulary, e.g. `Ġthe`."""
        return self._backend.id_to_token(token) or ""

    def _compute_bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        name = self.token_text(token)
        if self._byte_level:
            return b"".join(_BYTE_OF.get(c) or c.encode() for c in name)
        match = _BYTE_TOKEN.fullmatch(name)
        return bytes.fromhex(match[1]) if match else name.replace(_WORD_MARK, " ").encode()

    def _plain(self, text: str, start: int, end: int, guard: Mapping[str, str]) -> list[int]:
        """Ids of text[start:end], which holds no special token."""
        piece = put_back(text[start:end], guard)
        if not piece:
            return []
        backend = self._later if start else self._backend
        ids: list[int] = backend.encode(piece, add_special_tokens=False).ids
        if self._control_ids.isdisjoint(ids):
            return ids
        # A vocabulary that knows special tokens as ordinary pieces (Unigram): break them.
        cuts = [match.start() + 1 for match in self._pattern.finditer(piece)]
        ids = []
        for first, last in itertools.pairwise([0, *cuts, len(piece)]):
            ids += backend.encode(piece[first:last], add_special_tokens=False).ids
        return ids


def _around(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer's post-processor puts before and after a text."""
    bare = backend.encode("a", add_special_tokens=False).ids
    dressed: list[int] = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(dressed) - len(bare) + 1):
        if dressed[start : start + len(bare)] == bare:
            return dressed[:start], dressed[start + len(bare) :]
    raise ConfigError("tokenizer.json: its post_processor changes the text's own tokens")


def _settings(step: Any) -> Any:
    """A pre-tokenizer or decoder as it stands in tokenizer.json; None for none."""
    return None if step is None else json.loads(step.__getstate__())


def _parts(step: Any) -> list[dict[str, Any]]:
    """Its parts, sequences flattened."""
    if step is None:
        return []
    inner = step.get("pretokenizers") or step.get("decoders")
    return [part for item in inner for part in _parts(item)] if inner else [step]


def _shrinkage(normalizer: Any) -> float:
    """How many characters of a text may become one before it is cut into tokens."""
    if normalizer is None:
        return 1
    match normalizer["type"]:
        case "Sequence":
            return math.prod(map(_shrinkage, normalizer["normalizers"]))
        case "Prepend":
            return 1
        case "Replace" if len(normalizer["pattern"].get("String", "")) == 1:
            return 1
        case "NFC":
            return 4  # the longest canonical decomposition of one character
    return math.inf


def _fuses_unknown(model: tokenizers.models.Model) -> bool:
    """Whether one unknown token may stand for any number of characters."""
    if not isinstance(model, tokenizers.models.BPE):
        return True
    return bool(model.fuse_unk and not model.byte_fallback)


def _continuing(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer | None:
    """A copy that puts no word mark before its text, where only the first piece gets one."""
    parts = _parts(_settings(backend.pre_tokenizer))
    if not any(part.get("prepend_scheme") == "first" for part in parts):
        return None
    settings = json.loads(backend.to_str())
    for part in _parts(settings["pre_tokenizer"]):
        if part.get("prepend_scheme") == "first":
            part["prepend_scheme"] = "never"
    copy = tokenizers.Tokenizer.from_str(json.dumps(settings))
    copy.encode_special_tokens = True
    return copy


def _is_byte_level(decoder: list[dict[str, Any]]) -> bool:
    kinds = {part["type"] for part in decoder}
    if "ByteLevel" in kinds:
        return True
    if kinds & {"ByteFallback", "Metaspace", "Replace"}:
        return False
    raise ConfigError(
        f"tokenizer.json: its decoder {sorted(kinds) or None} is not supported; "
        "byte-level and SentencePiece decoders are"
    )


def _strips_first_space(decoder: list[dict[str, Any]]) -> bool:
    return any(
        (part["type"] == "Strip" and part.get("start", 0) > 0)
        or (part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never")
        for part in decoder
    )


def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's printable picture of each byte: itself where printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    pictures = {chr(byte): bytes([byte]) for byte in printable}
    return pictures | {chr(0x100 + i): bytes([byte]) for i, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()
