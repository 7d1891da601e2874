"""Hugging Face `config.json` → ModelSpec, for the families `llama`, `qwen2` and `qwen3`.

Defaults for absent keys are those of the `transformers` package. What would change the numbers
and is not computed here is refused with the name of its key.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from bifolio.errors import CheckpointError, UnsupportedError
from bifolio.spec.fields import MOST_EXPERTS, MOST_LAYERS, Fields
from bifolio.spec.model import ModelSpec, RopeSpec
from bifolio.wording import shown

logger = logging.getLogger(__name__)

FAMILIES = ("llama", "qwen2", "qwen3")
"""Values of `model_type` that can be read."""

_MAX_POSITION = {"llama": 2048, "qwen2": 32768, "qwen3": 32768}
_QWEN3_HEAD_DIM = 128

_NOT_COMPUTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu",), "the gated MLP knows silu only"),
    "partial_rotary_factor": ((1, 1.0), "rotation covers the whole head"),
    "rope_interleaved": ((False,), "rotation is by halves"),
    "is_encoder_decoder": ((False,), "only decoders are served"),
    "add_cross_attention": ((False,), "only decoders are served"),
    "attn_logit_softcapping": ((), "scores are not capped"),
    "final_logit_softcapping": ((), "logits are not capped"),
    "attention_multiplier": ((), "scores are scaled by 1 / sqrt(head_dim)"),
    "embedding_multiplier": ((1, 1.0), "embeddings are not scaled"),
    "residual_multiplier": ((1, 1.0), "residuals are not scaled"),
    "logits_scaling": ((1, 1.0), "logits are not scaled"),
    "no_rope_layers": (([],), "every layer rotates"),
    "attention_chunk_size": ((), "use sliding windows"),
    "use_mrope": ((False,), "positions are one number per token"),
    "sliding_window_pattern": ((), "say the kind of every layer in layer_types"),
    "num_experts": ((0,), "mixtures of experts are another family"),
    "num_local_experts": ((0, 1), "mixtures of experts are another family"),
}
_UNPROVED = (
    *("rope_theta", "rms_norm_eps", "max_position_embeddings", "original_max_position_embeddings"),
    *("num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group"),
    *("topk_method", "index_topk"),
)
"""Keys whose defaults no tensor's shape can contradict: what is taken for them is said."""

_THETA = 10_000.0
"""`default_theta` of every family here in transformers."""

_ROPE_SECTIONS = ("rope_parameters", "rope_scaling")
_BESIDE_SECTIONS = {"rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
_ROPE_SIZE = "qk_rope_head_dim"
"""A size of latent attention, which says nothing to other families."""

_ABOUT_ROTATION = re.compile(r"(^|_)m?(rope|rotary|theta|yarn)")
MOST_OF_ROPE = 1e12
"""Beyond any number of a rotation, so that its table is finite."""

_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}
_ROPE_KEYS |= {"factor", "original_max_position_embeddings"}
_ROPE_KEYS |= {"low_freq_factor", "high_freq_factor"}
_ROPE_KEYS |= {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_spec(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
) -> ModelSpec:
    """ModelSpec of a parsed `config.json`; end tokens also from `generation_config.json`.

    UnsupportedError names a key whose value is not supported, CheckpointError one that is
    missing, of a wrong type or in contradiction with another.
    """
    fields = Fields(config, "config.json")
    family = fields.text("model_type")
    if family not in FAMILIES:
        raise UnsupportedError(
            f"config.json: model_type={shown(family)} is not supported; families: "
            f"{', '.join(FAMILIES)}"
        )
    for key, (harmless, why) in _NOT_COMPUTED.items():
        fields.refuse_unless(key, harmless, why)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    max_position = fields.integer("max_position_embeddings", _MAX_POSITION[family])
    head_dim = _head_dim(fields, family, hidden, heads)
    generation = Fields(generation_config or {}, "generation_config.json")
    spec = ModelSpec(
        architecture=family,
        hidden=hidden,
        layers=fields.integer("num_hidden_layers", high=MOST_LAYERS),
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate=fields.integer("intermediate_size"),
        vocab=fields.integer("vocab_size"),
        max_position=max_position,
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        rope=read_rope(fields, head_dim, max_position, _NOT_COMPUTED),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=family == "qwen2" or fields.flag("attention_bias", False),
        output_bias=family != "qwen2" and fields.flag("attention_bias", False),
        mlp_bias=family == "llama" and fields.flag("mlp_bias", False),
        qk_norm=family == "qwen3",
        windows=_windows(fields, family),
        stop_ids=tuple(dict.fromkeys(fields.ids("eos_token_id") + generation.ids("eos_token_id"))),
        bos_id=next(iter(fields.ids("bos_token_id")), None),
    )
    check_shape(spec)
    say_defaults(fields, family)
    return spec


def say_defaults(fields: Fields, family: str) -> None:
    """Log what was taken for keys that a configuration leaves out, where it changes results."""
    if taken := fields.defaults(_UNPROVED):
        logger.warning(
            "config.json leaves something out; taking the defaults of %s in transformers: %s",
            family,
            taken,
        )


def check_shape(spec: ModelSpec) -> None:
    """CheckpointError where the numbers of a spec contradict each other."""
    if spec.heads % spec.kv_heads:
        raise CheckpointError(
            f"{spec.heads} attention heads cannot share {spec.kv_heads} key-value heads"
        )
    experts = (spec.layers + spec.mtp_layers) * (spec.moe.routed if spec.moe else 0)
    if experts > MOST_EXPERTS:
        raise CheckpointError(f"{experts} experts in all layers; at most {MOST_EXPERTS} are read")
    if spec.rope.dim % 2:
        raise CheckpointError(f"rotation needs an even head_dim, not {spec.rope.dim}")


def _head_dim(fields: Fields, family: str, hidden: int, heads: int) -> int:
    if "head_dim" in fields:
        return fields.integer("head_dim")
    if family == "qwen3":
        return _QWEN3_HEAD_DIM
    if hidden % heads:
        raise CheckpointError(
            f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, "
            "and head_dim is missing"
        )
    return hidden // heads


def read_rope(
    fields: Fields, head_dim: int, max_position: int, checked: Collection[str]
) -> RopeSpec:
    """How positions are rotated: `rope_parameters`, the older `rope_scaling`, and keys beside them.

    What stands in several places must be the same in all. A key about rotation that is neither
    known here nor one of `checked` (which the caller has looked at) is refused: a section under
    another name would not be read.
    """
    keys = fields.keys()
    for key in keys:
        known = key in (*_ROPE_SECTIONS, *_BESIDE_SECTIONS, _ROPE_SIZE) or key in checked
        if not known and _ABOUT_ROTATION.search(key.lower()):
            raise UnsupportedError(
                f"config.json: unknown key {shown(key)} about rotation; known: "
                f"{', '.join((*_ROPE_SECTIONS, *sorted(_BESIDE_SECTIONS)))}"
            )
    rope = _joined_rope(fields)
    rope.refuse_unless("partial_rotary_factor", (1, 1.0), "rotation covers the whole head")
    kind = rope.text("rope_type", "default")
    if kind not in ("default", "llama3", "yarn"):
        raise UnsupportedError(
            f"config.json: rope_type={shown(kind)} is not supported; types: default, llama3, yarn"
        )
    base = RopeSpec(
        theta=rope.number("rope_theta", _THETA, above=1.0, most=MOST_OF_ROPE),
        dim=head_dim,
        kind=kind,
    )
    if kind == "llama3":
        base = _llama3(rope, base, max_position)
    elif kind == "yarn":
        base = _yarn(rope, base, max_position)
    fields.take_defaults(rope)
    return base


def _joined_rope(fields: Fields) -> Fields:
    """All keys about rotation; CheckpointError where two places contradict each other."""
    joined: dict[str, Any] = {}
    places: dict[str, str] = {}
    for section in (*_ROPE_SECTIONS, ""):
        part = fields.part(section) if section else fields
        if section:
            part.refuse_others(_ROPE_KEYS)
        for key, value in part.items():
            if section or key in _BESIDE_SECTIONS:
                name = "rope_type" if key == "type" else key
                place = f"{section}.{key}" if section else key
                first = places.setdefault(name, place)
                if joined.setdefault(name, value) != value:
                    raise CheckpointError(
                        f"config.json: {first} is {shown(joined[name])} and {place} is "
                        f"{shown(value)}; leave one of them out"
                    )
    return Fields(joined, "config.json")


def _llama3(rope: Fields, base: RopeSpec, max_position: int) -> RopeSpec:
    low, high = (
        rope.number(key, most=MOST_OF_ROPE) for key in ("low_freq_factor", "high_freq_factor")
    )
    if low >= high:
        raise CheckpointError(
            f"config.json: low_freq_factor is {low:g}, which is not below high_freq_factor {high:g}"
        )
    return replace(
        base,
        factor=rope.number("factor", most=MOST_OF_ROPE),
        original_max_position=rope.integer("original_max_position_embeddings", max_position),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(rope: Fields, base: RopeSpec, max_position: int) -> RopeSpec:
    original = rope.integer("original_max_position_embeddings", max_position)
    attention_factor, mscale, mscale_all_dim = (
        rope.number(key, above=-MOST_OF_ROPE, most=MOST_OF_ROPE) if key in rope else None
        for key in ("attention_factor", "mscale", "mscale_all_dim")
    )
    return replace(
        base,
        factor=rope.number("factor", max_position / original, most=MOST_OF_ROPE),
        original_max_position=original,
        beta_fast=rope.number("beta_fast", 32.0, most=MOST_OF_ROPE),
        beta_slow=rope.number("beta_slow", 1.0, most=MOST_OF_ROPE),
        attention_factor=attention_factor,
        mscale=mscale,
        mscale_all_dim=mscale_all_dim,
        truncate=rope.flag("truncate", True),
    )


def _windows(fields: Fields, family: str) -> tuple[int | None, ...]:
    """The window of each layer: `layer_types` decides; a bare window means what Qwen2 says.

    In Qwen, `sliding_window` counts only with `use_sliding_window`, and without `layer_types` for
    the layers from `max_window_layers` on.
    """
    layers = fields.integer("num_hidden_layers", high=MOST_LAYERS)
    used = family == "llama" or fields.flag("use_sliding_window", False)
    window = fields.integer("sliding_window") if used and "sliding_window" in fields else None
    if family != "llama" and used and window is None:
        raise CheckpointError("config.json: use_sliding_window is true, sliding_window is not set")
    if "layer_types" in fields:
        kinds = fields.texts("layer_types")
        if len(kinds) != layers:
            raise CheckpointError(f"config.json: layer_types names {len(kinds)} layers of {layers}")
    elif family == "llama":
        if window is not None:
            raise UnsupportedError(
                "config.json: sliding_window without layer_types; say the kind of every layer"
            )
        kinds = [_FULL] * layers
    else:
        first = fields.integer("max_window_layers", 28, low=0)
        kinds = [_SLIDING if window and i >= first else _FULL for i in range(layers)]
    for kind in kinds:
        if kind not in (_FULL, _SLIDING):
            raise UnsupportedError(
                f"config.json: layer_types holds {shown(kind)}; kinds: {_FULL}, {_SLIDING}"
            )
    if _SLIDING in kinds and window is None:
        raise CheckpointError(
            "config.json: layer_types holds sliding_attention, but sliding_window is not set"
        )
    return tuple(window if kind == _SLIDING else None for kind in kinds)
