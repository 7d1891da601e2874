"""Any supported `config.json` → ModelSpec, by its `model_type`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bifolio.errors import UnsupportedError
from bifolio.spec.fields import Fields
from bifolio.spec.hf import FAMILIES, read_spec
from bifolio.spec.hf_mla import MLA_FAMILIES, read_mla_spec
from bifolio.spec.hf_moe import MOE_FAMILIES, read_moe_spec
from bifolio.spec.model import ModelSpec
from bifolio.wording import shown

_READERS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any] | None], ModelSpec]] = (
    dict.fromkeys(FAMILIES, read_spec)
    | dict.fromkeys(MLA_FAMILIES, read_mla_spec)
    | dict.fromkeys(MOE_FAMILIES, read_moe_spec)
)


def read_config(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
) -> ModelSpec:
    """ModelSpec of a parsed `config.json`; end tokens also from `generation_config.json`.

    UnsupportedError names the family or the key that is not supported, CheckpointError a key that
    is missing, of a wrong type or in contradiction with another.
    """
    family = Fields(config, "config.json").text("model_type")
    reader = _READERS.get(family)
    if reader is None:
        raise UnsupportedError(
            f"config.json: model_type={shown(family)} is not supported; families: "
            f"{', '.join(_READERS)}"
        )
    return reader(config, generation_config)
