"""Which tokens of a GGUF file have a part to play."""

from __future__ import annotations

from bifolio.spec.fields import Fields

NO_TOKEN = (-1, 2**32 - 1, 2**64 - 1)
"""Ids that say that the model has no such token: converters write -1, in signed fields or not."""

END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def token_ids(fields: Fields, name: str) -> tuple[int, ...]:
    """Ids under `tokenizer.ggml.{name}`; none where the file has none or says so."""
    return fields.ids(f"tokenizer.ggml.{name}", absent=NO_TOKEN)


def end_token_ids(fields: Fields) -> tuple[int, ...]:
    """Ids that end an answer."""
    return tuple(i for key in END_KEYS for i in token_ids(fields, key))
