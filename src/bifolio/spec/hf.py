"""Hugging Face `config.json` → ModelSpec, for the families `llama`, `qwen2` and `qwen3`.

Defaults for absent keys are those of the `transformers` package. What would change the numbers
and is not computed here is refused with the name of its key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bifolio.errors import CheckpointError, UnsupportedError
from bifolio.spec.fields import MOST_LAYERS, Fields
from bifolio.spec.model import ModelSpec, RopeSpec

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
            f"config.json: model_type={family!r} is not supported; families: {', '.join(FAMILIES)}"
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
        rope=read_rope(fields, head_dim, max_position),
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
    return spec


def check_shape(spec: ModelSpec) -> None:
    """CheckpointError where the numbers of a spec contradict each other."""
    if spec.heads % spec.kv_heads:
        raise CheckpointError(
            f"{spec.heads} attention heads cannot share {spec.kv_heads} key-value heads"
        )
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


def read_rope(fields: Fields, head_dim: int, max_position: int) -> RopeSpec:
    """`rope_scaling` (older files) wins over `rope_parameters`, as in transformers."""
    rope = fields.part("rope_scaling" if fields.part("rope_scaling").keys() else "rope_parameters")
    rope.refuse_others(_ROPE_KEYS)
    rope.refuse_unless("partial_rotary_factor", (1, 1.0), "rotation covers the whole head")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    kind = rope.text("rope_type", rope.text("type", "default"))
    base = RopeSpec(theta=theta, dim=head_dim)
    original = fields.integer(
        "original_max_position_embeddings",
        rope.integer("original_max_position_embeddings", max_position),
    )
    match kind:
        case "default":
            return base
        case "llama3":
            return RopeSpec(
                theta=theta,
                dim=head_dim,
                kind=kind,
                factor=rope.number("factor"),
                original_max_position=original,
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
            )
        case "yarn":
            return RopeSpec(
                theta=theta,
                dim=head_dim,
                kind=kind,
                factor=rope.number("factor", max_position / original),
                original_max_position=original,
                beta_fast=rope.number("beta_fast", 32.0),
                beta_slow=rope.number("beta_slow", 1.0),
                attention_factor=rope.optional_number("attention_factor"),
                mscale=rope.optional_number("mscale"),
                mscale_all_dim=rope.optional_number("mscale_all_dim"),
                truncate=rope.flag("truncate", True),
            )
        case _:
            raise UnsupportedError(
                f"config.json: rope_type={kind!r} is not supported; types: default, llama3, yarn"
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
                f"config.json: layer_types holds {kind!r}; kinds: {_FULL}, {_SLIDING}"
            )
    if _SLIDING in kinds and window is None:
        raise CheckpointError(
            "config.json: layer_types holds sliding_attention, but sliding_window is not set"
        )
    return tuple(window if kind == _SLIDING else None for kind in kinds)
