"""The sampling that a model's own files recommend: generation_config.json, or GGUF metadata.

    generation_config.json   temperature · top_k · top_p · min_p · repetition_penalty · do_sample
    GGUF, general.sampling.  temp · top_k · top_p · min_p · penalty_repeat

Where `do_sample` is false answers are greedy, and the file's other sampling values are not used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bifolio.errors import CheckpointError, RequestError
from bifolio.request import DEFAULTED, SamplingParams
from bifolio.spec.fields import Fields

GENERATION_CONFIG = "generation_config.json"

_GGUF = "general.sampling."
_GGUF_KEYS = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}

_NOT_APPLIED = {
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "penalty_alpha": 0.0,
    "num_beams": 1,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "sequence": None,
    "xtc_probability": 0.0,
    "mirostat": 0,
}
"""Keys that would change tokens and that we have no code for, with the values that are off."""


@dataclass(frozen=True, slots=True)
class DefaultSampling:
    """What requests are sampled by that leave a parameter out. `origin`: the file, if one says.

    `not_applied` are keys of the file that would change tokens and that nothing here knows.
    """

    params: SamplingParams = field(default_factory=SamplingParams)
    origin: str = ""
    not_applied: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, float]:
        """The parameters by name."""
        return {name: getattr(self.params, name) for name in DEFAULTED}

    def __str__(self) -> str:
        """Those that differ from ours, and who says so."""
        plain = SamplingParams()
        changes = [
            f"{name} {value:g}"
            for name, value in self.as_dict().items()
            if value != getattr(plain, name)
        ]
        return f"{', '.join(changes)} ({self.origin})" if changes else ""


def default_sampling_of(
    generation_config: Mapping[str, Any], gguf: Mapping[str, Any] | None = None
) -> DefaultSampling:
    """Read one of the two. CheckpointError names the key with a wrong type or value."""
    values: Mapping[str, Any]
    if gguf is None:
        values, origin = generation_config, GENERATION_CONFIG
    else:
        origin = "GGUF metadata"
        found = {k.removeprefix(_GGUF): v for k, v in gguf.items() if k.startswith(_GGUF)}
        own = {key: name for name, key in _GGUF_KEYS.items()}
        values = {own.get(key, key): _without_noise(value) for key, value in found.items()}
    try:
        params = _read(Fields(values, origin))
        params.check(vocab=1)
    except (CheckpointError, RequestError) as error:
        where = "" if isinstance(error, CheckpointError) else f"{origin}: "
        raise CheckpointError(
            f"{where}{error}; hint: correct it, or start with --generation-config none"
        ) from error
    not_applied = [
        key for key, off in _NOT_APPLIED.items() if values.get(key) not in (None, off, [], "")
    ]
    return DefaultSampling(params, origin, tuple(not_applied))


def _read(fields: Fields) -> SamplingParams:
    found: dict[str, Any] = {}
    greedy = not fields.flag("do_sample", True)
    for name in DEFAULTED:
        if name not in fields or (greedy and name != "repetition_penalty"):
            continue
        if name == "top_k":
            found[name] = max(0, fields.integer(name, low=-1))
        else:
            found[name] = fields.number(name, above=-math.inf)
    return msgspec.structs.replace(SamplingParams(temperature=0.0 if greedy else 1.0), **found)


def _without_noise(value: Any) -> Any:
    """A float32 as the decimal number that was meant: 0.95, not 0.949999988."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
