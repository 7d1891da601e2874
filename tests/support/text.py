"""A tokenizer whose ids are bytes, and a template: small enough to read a test's ids by eye."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from bifolio.server.prepare import BodyRoute, Prepared, prepare
from bifolio.text.chat_template import ChatTemplate, TemplateSource
from bifolio.text.prompt_ids import TextLimits
from bifolio.text.tokenizer import Tokenizer
from bifolio.text.tokenizer_files import TextTools, compile_template

BOS, EOS, IM_START, IM_END, THINK = range(256, 261)
FIRST_WORD = 261
"""Id of the first of `plural`."""

_SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_pictures() -> dict[str, int]:
    """Vocabulary of byte-level BPE in which each id is its byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    pictures = {chr(byte): byte for byte in printable}
    return pictures | {chr(256 + i): byte for i, byte in enumerate(others)}


def byte_backend(words: Sequence[str] = (), *, add_bos: bool = False) -> Backend:
    """Ids 0 to 255 are bytes, then special tokens, `<think>`, and `plural`.

    Words are only ever decoded: no merge leads to them. `add_bos` starts each prompt with `<s>`.
    """
    vocab = byte_pictures()
    picture = {byte: char for char, byte in vocab.items()}
    for i, word in enumerate(words):
        name = "".join(picture[byte] for byte in word.encode())
        assert name not in vocab, f"{word!r} is a token already"
        vocab[name] = FIRST_WORD + i
    backend = Backend(models.BPE(vocab=vocab | _special_ids(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in _SPECIAL])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
        )
    return backend


def byte_tokenizer(words: Sequence[str] = (), *, add_bos: bool = False) -> Tokenizer:
    """The tokenizer over `byte_backend`; `<|im_end|>` is its end token."""
    return Tokenizer(
        byte_backend(words, add_bos=add_bos),
        named={"bos_token": "<s>", "eos_token": "<|im_end|>"},
        stop_ids=[IM_END],
    )


def chatml(tokenizer: Tokenizer, text: str = CHATML) -> ChatTemplate:
    """A template over that tokenizer's special tokens."""
    return compile_template(TemplateSource({"default": text}, "the test"), tokenizer)


def _special_ids() -> dict[str, int]:
    return {text: BOS + i for i, text in enumerate((*_SPECIAL, "<think>"))}


class InlineText:
    """Prepares requests in this process: for servers whose text side exists as objects only."""

    def __init__(self, text: TextTools) -> None:
        self._text = text
        self.template = None if text.template is None else text.template.text

    async def prepare(
        self, route: BodyRoute, data: bytes, limits: TextLimits, client: str
    ) -> Prepared:
        """See `TextPool.prepare`; nothing is limited."""
        del client
        return await asyncio.to_thread(prepare, route, data, self._text, limits)
