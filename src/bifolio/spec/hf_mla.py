"""Hugging Face `config.json` → ModelSpec for latent attention with experts.

Families `deepseek_v2`, `deepseek_v3` (DeepSeek-V3 and R1), `kimi_k2`, the text part of `kimi_k25`,
and `glm_moe_dsa` (GLM-5), which adds the indexer of sparse attention. Defaults for absent keys are
those of the `transformers` package. How the checkpoint stores its weights is not read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bifolio.errors import CheckpointError, UnsupportedError
from bifolio.spec.blocks import IndexerSpec, MLASpec, MoESpec, RouterSpec, Scoring
from bifolio.spec.fields import MOST_LAYERS, Fields
from bifolio.spec.hf import check_shape, read_rope, say_defaults
from bifolio.spec.model import ModelSpec

MLA_FAMILIES = ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "glm_moe_dsa")
"""Values of `model_type` that can be read."""

_DEEPSEEK = {
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "max_position_embeddings": 4096,
}
_DEEPSEEK_V2 = {
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 2048,
}
_GLM = {
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 202752,
}
_NOT_COMPUTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu",), "the gated MLP knows silu only"),
    "attention_bias": ((False,), "projections have no bias"),
    "mlp_bias": ((False,), "projections have no bias"),
    "moe_layer_freq": ((1,), "every layer after the dense ones has experts"),
    "sliding_window": ((), "attention is over the whole context"),
}
_ABOUT_ROTATION = ("rope_interleave", "indexer_rope_interleave")
_BY_SIGMOID: dict[str, tuple[tuple[Any, ...], str]] = {
    "scoring_func": (("sigmoid",), "the router scores by sigmoid"),
    "topk_method": (("noaux_tc",), "experts are chosen with a correction bias"),
}
_GREEDY, _IN_GROUPS = "greedy", "group_limited_greedy"
_BY_SOFTMAX: dict[str, tuple[tuple[Any, ...], str]] = {
    "scoring_func": (("softmax",), "the router scores by softmax"),
    "topk_method": ((_GREEDY, _IN_GROUPS), "the best experts are chosen, perhaps in groups"),
    "norm_topk_prob": ((False,), "weights of experts are their scores"),
    "rope_interleave": ((True,), "pairs that rotate are neighbours"),
}


def read_mla_spec(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
) -> ModelSpec:
    """ModelSpec of a parsed `config.json`; end tokens also from `generation_config.json`.

    `architecture` is `deepseek_v2`, `deepseek_v3` or `glm_moe_dsa`. UnsupportedError names a
    key whose value is not supported, CheckpointError one that is missing, of a wrong type or in
    contradiction.
    """
    fields = Fields(config, "config.json")
    if fields.text("model_type") == "kimi_k25":
        fields, config = fields.part("text_config"), config.get("text_config") or {}
    sparse, second = (fields.text("model_type") == f for f in ("glm_moe_dsa", "deepseek_v2"))
    defaults = _GLM if sparse else _DEEPSEEK_V2 if second else _DEEPSEEK
    refused = _NOT_COMPUTED | (_BY_SOFTMAX if second else _BY_SIGMOID)
    for key, (harmless, why) in refused.items():
        fields.refuse_unless(key, harmless, why)
    heads, layers = (
        fields.integer("num_attention_heads"),
        fields.integer("num_hidden_layers", high=MOST_LAYERS),
    )
    fields.refuse_unless("num_key_value_heads", (heads,), "the latent is shared by all heads")
    max_position = fields.integer("max_position_embeddings", defaults["max_position_embeddings"])
    mla = _mla(fields, config, defaults, sparse)
    generation = Fields(generation_config or {}, "generation_config.json")
    spec = ModelSpec(
        architecture="glm_moe_dsa" if sparse else "deepseek_v2" if second else "deepseek_v3",
        hidden=fields.integer("hidden_size"),
        layers=layers,
        heads=heads,
        kv_heads=1,
        head_dim=mla.qk,
        intermediate=fields.integer("intermediate_size"),
        vocab=fields.integer("vocab_size"),
        max_position=max_position,
        rms_eps=fields.number("rms_norm_eps", 1e-5 if sparse else 1e-6),
        rope=read_rope(fields, mla.rope, max_position, _ABOUT_ROTATION),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        windows=(None,) * layers,
        stop_ids=tuple(dict.fromkeys(fields.ids("eos_token_id") + generation.ids("eos_token_id"))),
        bos_id=next(iter(fields.ids("bos_token_id")), None),
        mla=mla,
        moe=_moe_by_softmax(fields, layers) if second else _moe(fields, defaults, layers),
        indexer=_indexer(fields, layers) if sparse else None,
        mtp_layers=fields.integer("num_nextn_predict_layers", 0, low=0, high=MOST_LAYERS),
    )
    check_shape(spec)
    say_defaults(fields, fields.text("model_type"))
    return spec


def _mla(
    fields: Fields, config: Mapping[str, Any], defaults: Mapping[str, int], sparse: bool
) -> MLASpec:
    direct = "q_lora_rank" in config and config["q_lora_rank"] is None
    if sparse:
        fields.refuse_unless("rope_interleave", (True,), "pairs that rotate are neighbours")
    if direct and sparse:
        raise CheckpointError("config.json: q_lora_rank is null, but the indexer reads its output")
    return MLASpec(
        q_lora=None if direct else fields.integer("q_lora_rank", defaults["q_lora_rank"]),
        kv_lora=fields.integer("kv_lora_rank", 512),
        nope=fields.integer("qk_nope_head_dim", defaults["qk_nope_head_dim"]),
        rope=fields.integer("qk_rope_head_dim", 64),
        v=fields.integer("v_head_dim", defaults["v_head_dim"]),
        rope_interleaved=fields.flag("rope_interleave", True),
    )


def _moe(fields: Fields, defaults: Mapping[str, int], layers: int) -> MoESpec:
    routed, top_k = (
        fields.integer("n_routed_experts", 256),
        fields.integer("num_experts_per_tok", 8),
    )
    groups = fields.integer("n_group", defaults["n_group"])
    top_groups = fields.integer("topk_group", defaults["topk_group"])
    _check_groups(routed, top_k, groups, top_groups)
    if groups > 1 and routed // groups < 2:
        raise CheckpointError(
            f"config.json: groups are ranked by their two best experts, but {routed} experts in "
            f"{groups} groups are fewer than two each"
        )
    return MoESpec(
        routed=routed,
        top_k=top_k,
        shared=fields.integer("n_shared_experts", 1, low=0),
        intermediate=fields.integer("moe_intermediate_size", 2048),
        router=RouterSpec(
            scoring=Scoring.SIGMOID,
            correction_bias=True,
            groups=groups,
            top_groups=top_groups,
            normalize=fields.flag("norm_topk_prob", True),
            scale=fields.number("routed_scaling_factor", 2.5),
        ),
        first_dense=_first_dense(fields, layers),
    )


def _moe_by_softmax(fields: Fields, layers: int) -> MoESpec:
    """DeepSeek-V2: groups are ranked by their best expert, and nothing is normalised."""
    in_groups = fields.text("topk_method", _GREEDY) == _IN_GROUPS
    groups, top_groups = (
        fields.integer(key) if in_groups else 1 for key in ("n_group", "topk_group")
    )
    routed, top_k = fields.integer("n_routed_experts", 64), fields.integer("num_experts_per_tok")
    _check_groups(routed, top_k, groups, top_groups)
    return MoESpec(
        routed=routed,
        top_k=top_k,
        shared=fields.integer("n_shared_experts", 2, low=0),
        intermediate=fields.integer("moe_intermediate_size", 1407),
        router=RouterSpec(
            scoring=Scoring.SOFTMAX,
            groups=groups,
            top_groups=top_groups,
            group_best=1,
            normalize=False,
            scale=fields.number("routed_scaling_factor", 1.0),
        ),
        first_dense=min(fields.integer("first_k_dense_replace", 0, low=0), layers),
    )


def _check_groups(routed: int, top_k: int, groups: int, top_groups: int) -> None:
    if routed % groups or top_groups > groups or top_k > top_groups * (routed // groups):
        raise CheckpointError(
            f"config.json: {top_k} of {routed} experts cannot be chosen from {top_groups} of "
            f"{groups} groups"
        )


def _first_dense(fields: Fields, layers: int) -> int:
    first = min(fields.integer("first_k_dense_replace", 3, low=0), layers)
    if "mlp_layer_types" not in fields:
        return first
    kinds = fields.texts("mlp_layer_types")
    dense = kinds.count("dense")
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise UnsupportedError(
            f"config.json: mlp_layer_types must be dense layers followed by sparse ones, {layers} "
            f"together, not {kinds}"
        )
    return dense


def _indexer(fields: Fields, layers: int) -> IndexerSpec:
    """Which layers own an index: a list, a pattern of F and S, or a frequency and an offset."""
    if "indexer_types" in fields:
        kinds = fields.texts("indexer_types")
    elif "index_topk_pattern" in fields:
        names = {"F": "full", "S": "shared"}
        kinds = [names.get(letter, letter) for letter in fields.text("index_topk_pattern")]
    else:
        every = fields.integer("index_topk_freq", 1)
        offset = fields.integer("index_skip_topk_offset", 2, low=0)
        kinds = [
            "shared" if max(layer - offset + 1, 0) % every else "full" for layer in range(layers)
        ]
    if len(kinds) != layers or set(kinds) - {"full", "shared"} or kinds[0] != "full":
        raise CheckpointError(
            f"config.json: each of {layers} layers is full or shared and the first is full; the "
            f"configuration says {kinds}"
        )
    return IndexerSpec(
        heads=fields.integer("index_n_heads", 32),
        dim=fields.integer("index_head_dim", 128),
        top_k=fields.integer("index_topk", 2048),
        owners=tuple(layer for layer, kind in enumerate(kinds) if kind == "full"),
        rope_interleaved=fields.flag("indexer_rope_interleave", True),
    )
