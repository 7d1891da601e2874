"""Finds a model's tokenizer and chat template: side files of a checkpoint, or GGUF metadata.

The template comes from the first of: the caller (`--chat-template`), `chat_template.jinja`,
`chat_template.json`, `tokenizer_config.json`; or from the GGUF file. It is compiled and tried at
the start, not at the first request.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from bifolio.engine.chat_template import ChatTemplate, TemplateSource
from bifolio.engine.tokenizer import Tokenizer
from bifolio.engine.tokenizer_gguf import tokenizer_from_gguf
from bifolio.errors import CheckpointError, ConfigError, cause_of
from bifolio.spec.fields import Fields

logger = logging.getLogger(__name__)

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True)
class TextSide:
    """What turns messages into token ids and token ids into text."""

    tokenizer: Tokenizer
    template: ChatTemplate | None


def load_text_side(source: Path | Mapping[str, Any], chat_template: str = "") -> TextSide:
    """Tokenizer and template of a checkpoint folder, or of the metadata of a GGUF file.

    `chat_template` is a file, or a template's text, that goes before the model's own. The control
    text with which the template ends an answer is an end token, too.
    CheckpointError and ConfigError name the file at fault.
    """
    tokenizer = load_tokenizer(source)
    found = _template_in_folder(source) if isinstance(source, Path) else _template_in_gguf(source)
    if chat_template:
        found = _given_template(chat_template)
    return TextSide(tokenizer, None if found is None else compile_template(found, tokenizer))


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
        backend = Backend.from_str(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not (folder / "config.json").exists():
            raise CheckpointError(
                f"{folder} is no model: it has neither config.json nor tokenizer.json"
            ) from error
        raise CheckpointError(
            f"{folder} has no tokenizer.json; save one with transformers' "
            "AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        ) from error
    except Exception as error:  # the package raises bare Exception
        raise CheckpointError(f"cannot read {path}: {cause_of(error)}") from error
    settings = read_json(folder / "special_tokens_map.json") | read_json(
        folder / "tokenizer_config.json"
    )
    _add_declared(backend, settings)
    named = {name: text for name in NAMED_TOKENS if (text := _text(settings.get(name)))}
    _add_missing(backend, named)
    stop_ids = [backend.token_to_id(named["eos_token"])] if "eos_token" in named else []
    return Tokenizer(backend, named=named, stop_ids=[i for i in stop_ids if i is not None])


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty when there is no such file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {cause_of(error)}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return found


def _text(token: Any) -> str | None:
    """The text of a token that is a string or an object with `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _add_declared(backend: Backend, settings: dict[str, Any]) -> None:
    """Add the tokens of `added_tokens_decoder` that tokenizer.json lacks, in the order of ids."""
    known = backend.get_added_tokens_decoder()
    declared = Fields(settings, "tokenizer_config.json").part("added_tokens_decoder")
    keys = declared.keys()
    for key in keys:
        if not key.isdecimal():
            raise CheckpointError(
                f"tokenizer_config.json: added_tokens_decoder: {key!r} is no token id"
            )
    for key in sorted(keys, key=int):
        if int(key) in known:
            continue
        token = declared.part(key)
        text = token.text("content")
        flags = {
            flag: token.flag(flag, False)
            for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")
        }
        backend.add_tokens([AddedToken(text, **flags)])
        if backend.token_to_id(text) != int(key):
            raise CheckpointError(
                f"tokenizer_config.json gives {text!r} the id {key}, but it is "
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
        return TemplateSource({"default": Path(given).read_text(encoding="utf-8")}, given)
    except OSError as error:
        raise ConfigError(f"cannot read the chat template {given}: {cause_of(error)}") from error


def _template_in_folder(folder: Path) -> TemplateSource | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        texts = {"default": path.read_text(encoding="utf-8")}
        for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            texts[extra.stem] = extra.read_text(encoding="utf-8")
        return TemplateSource(texts, str(path))
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = read_json(folder / name).get("chat_template")
        if isinstance(found, str):
            return TemplateSource({"default": found}, str(folder / name))
        if found:
            texts = {item["name"]: item["template"] for item in found}
            return TemplateSource(texts, str(folder / name))
    return None


def _template_in_gguf(metadata: Mapping[str, Any]) -> TemplateSource | None:
    fields, key = Fields(metadata, "the GGUF file"), "tokenizer.chat_template"
    if key not in fields:
        return None
    names = fields.texts(f"{key}s") if f"{key}s" in fields else []
    texts = {name: fields.text(f"{key}.{name}") for name in names if f"{key}.{name}" in fields}
    return TemplateSource({"default": fields.text(key)} | texts, "the GGUF file")
