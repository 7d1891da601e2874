"""Finds a model's tokenizer and chat template: side files of a checkpoint, or GGUF metadata.

The template comes from the first of: the caller (`--chat-template`), `chat_template.jinja`,
`chat_template.json`, `tokenizer_config.json`; or from the GGUF file. It is compiled and tried at
the start, not at the first request.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from bifolio.errors import BifolioError, CheckpointError, ConfigError, cause_of
from bifolio.input_files import LARGE_BYTES, read_object, read_text, visible
from bifolio.spec.fields import Fields
from bifolio.text.chat_template import ChatTemplate, TemplateSource
from bifolio.text.tokenizer import Tokenizer
from bifolio.text.tokenizer_gguf import tokenizer_from_gguf
from bifolio.wording import cut, shown

logger = logging.getLogger(__name__)

_CONFIG, _SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True)
class TextTools:
    """What turns messages into token ids and token ids into text."""

    tokenizer: Tokenizer
    template: ChatTemplate | None


def load_text_side(source: Path | Mapping[str, Any], chat_template: str = "") -> TextTools:
    """Tokenizer and template of a checkpoint folder, or of the metadata of a GGUF file.

    `chat_template` is a file, or a template's text, that goes before the model's own. The control
    text with which the template ends an answer is an end token, too.
    CheckpointError and ConfigError name the file at fault.
    """
    tokenizer = load_tokenizer(source)
    found = _template_in_folder(source) if isinstance(source, Path) else _template_in_gguf(source)
    if chat_template:
        found = _given_template(chat_template)
    return TextTools(tokenizer, None if found is None else compile_template(found, tokenizer))


def compile_template(source: TemplateSource, tokenizer: Tokenizer) -> ChatTemplate:
    """The template for a tokenizer, which learns of its marks and of its end of a turn."""
    template = ChatTemplate(
        source,
        named=tokenizer.named,
        special_texts=tokenizer.special_texts,
        added_texts=tokenizer.added_texts,
    )
    tokenizer.reserve(template.marks)
    end = template.turn_end([tokenizer.decode([i]) for i in tokenizer.stop_ids])
    if end is not None:
        logger.info("the chat template in %s ends an answer with %r", template.origin, end)
        tokenizer.stop_ids |= set(tokenizer.encode(end))
    return template


def load_tokenizer(source: Path | Mapping[str, Any]) -> Tokenizer:
    """The tokenizer alone; errors as of `load_text_side`."""
    return (
        tokenizer_from_folder(source) if isinstance(source, Path) else tokenizer_from_gguf(source)
    )


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """Read tokenizer.json, tokenizer_config.json and special_tokens_map.json of a checkpoint.

    `tokenizer_config.json` wins over `special_tokens_map.json`. What is put around a plain prompt
    is the post-processor's matter: like transformers, we do not read `add_bos_token` where there
    is a tokenizer.json. CheckpointError names the file that is missing or damaged.
    """
    path = folder / "tokenizer.json"
    try:
        text = read_text(path, LARGE_BYTES)
    except FileNotFoundError as error:
        if not (folder / "config.json").exists():
            raise CheckpointError(
                f"{folder} is no model: it has neither config.json nor tokenizer.json"
            ) from error
        raise CheckpointError(
            f"{folder} has no tokenizer.json; save one with transformers' "
            "AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {cause_of(error)}") from error
    with _the_package(path):
        backend = Backend.from_str(text)
    settings = {name: read_object(folder / name) or {} for name in (_CONFIG, _SPECIAL_TOKENS)}
    fields = {name: Fields(found, name) for name, found in settings.items()}
    _add_declared(backend, fields[_CONFIG])
    named: dict[str, str] = {}
    for name in NAMED_TOKENS:
        file = _CONFIG if name in settings[_CONFIG] else _SPECIAL_TOKENS
        if token := fields[file].token(name):
            named[name] = token
    with _the_package(path):
        _add_missing(backend, named)
        stop_ids = [backend.token_to_id(named["eos_token"])] if "eos_token" in named else []
        return Tokenizer(backend, named=named, stop_ids=[i for i in stop_ids if i is not None])


@contextmanager
def _the_package(path: Path) -> Iterator[None]:
    """What the package does not accept is a CheckpointError.

    It raises bare Exceptions, and where it meets its own mistakes a BaseException of its own.
    """
    try:
        yield
    except (BifolioError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        said = str(error).strip().split("\n")[0] or type(error).__name__
        raise CheckpointError(f"cannot read {path}: {cut(said, 200)}") from error


def _add_declared(backend: Backend, settings: Fields) -> None:
    """Add the tokens of `added_tokens_decoder` that tokenizer.json lacks, in the order of ids."""
    known = backend.get_added_tokens_decoder()
    declared = settings.part("added_tokens_decoder")
    for key, token in sorted(declared.numbered()):
        if key in known:
            continue
        text = token.text("content")
        flags = {
            flag: token.flag(flag, False)
            for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")
        }
        backend.add_tokens([AddedToken(text, **flags)])
        if backend.token_to_id(text) != key:
            raise CheckpointError(
                f"tokenizer_config.json gives {shown(text)} the id {key}, but it is "
                f"{backend.token_to_id(text)} in tokenizer.json"
            )


def _add_missing(backend: Backend, named: dict[str, str]) -> None:
    """Make BOS, EOS and their like special tokens where tokenizer.json does not."""
    known = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    for text in named.values():
        if text not in known and backend.token_to_id(text) is not None:
            backend.add_special_tokens([AddedToken(text, normalized=False, special=True)])


def _given_template(given: str) -> TemplateSource:
    if "{%" in given or "{{" in given:
        return TemplateSource({"default": given}, "--chat-template")
    try:
        return TemplateSource({"default": read_text(Path(given), pipe=True)}, given)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the chat template {cut(given, 200)}: {cause_of(error)}"
        ) from error


def _template_in_folder(folder: Path) -> TemplateSource | None:
    path = folder / "chat_template.jinja"
    try:
        texts = {"default": read_text(path)}
        for path in visible(folder / "additional_chat_templates", "*.jinja"):
            texts[path.stem] = read_text(path)
        return TemplateSource(texts, str(folder / "chat_template.jinja"))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {cause_of(error)}") from error
    for name in ("chat_template.json", _CONFIG):
        settings = read_object(folder / name) or {}
        found = settings.get("chat_template")
        if isinstance(found, str):
            return TemplateSource({"default": found}, str(folder / name))
        if named := Fields(settings, name).parts("chat_template"):
            texts = {one.text("name"): one.text("template") for one in named}
            return TemplateSource(texts, str(folder / name))
    return None


def _template_in_gguf(metadata: Mapping[str, Any]) -> TemplateSource | None:
    fields, key = Fields(metadata, "the GGUF file"), "tokenizer.chat_template"
    if key not in fields:
        return None
    names = fields.texts(f"{key}s") if f"{key}s" in fields else []
    texts = {name: fields.text(f"{key}.{name}") for name in names if f"{key}.{name}" in fields}
    return TemplateSource({"default": fields.text(key)} | texts, "the GGUF file")
