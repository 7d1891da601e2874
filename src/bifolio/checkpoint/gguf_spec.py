"""GGUF metadata → ModelSpec, for the architectures `llama`, `qwen2` and `qwen3`."""

from __future__ import annotations

import logging
import struct
from dataclasses import replace

from bifolio.checkpoint.gguf import TYPES, GGUFFile
from bifolio.errors import CheckpointError, UnsupportedError
from bifolio.spec import ModelSpec, RopeSpec
from bifolio.spec.fields import Fields
from bifolio.spec.gguf_tokens import end_token_ids, token_ids
from bifolio.spec.hf import FAMILIES, MOST_OF_ROPE, check_shape
from bifolio.wording import shown

logger = logging.getLogger(__name__)

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor (F32) that divides the frequency of each rotated pair; it belongs to the spec."""

_ROPE_KEYS = {"dimension_count", "freq_base", "scale_linear"}
_ROPE_KEYS |= {f"scaling.{key}" for key in ("type", "factor", "finetuned", "attn_factor")}
_ROPE_KEYS.add("scaling.original_context_length")
_ROPE_KEYS |= {f"scaling.yarn_{key}" for key in ("beta_fast", "beta_slow", "attn_factor")}
_ROPE_KEYS |= {"scaling.yarn_ext_factor"}


def gguf_spec(file: GGUFFile) -> ModelSpec:
    """ModelSpec of a GGUF file; UnsupportedError and CheckpointError name the metadata key."""
    fields = Fields(file.metadata, file.path.name)
    family = fields.text("general.architecture")
    if family not in FAMILIES:
        raise UnsupportedError(
            f"{file.path.name}: general.architecture={shown(family)} is not supported; "
            f"architectures: {', '.join(FAMILIES)}"
        )
    for key in ("attention.sliding_window", "expert_count", "attn_logit_softcapping"):
        fields.refuse_unless(f"{family}.{key}", (0,), "this build cannot compute it")
    fields.refuse_unless("split.count", (0, 1), "merge the parts with llama-gguf-split --merge")
    hidden = fields.integer(f"{family}.embedding_length")
    heads = fields.integer(f"{family}.attention.head_count")
    head_dim = fields.integer(f"{family}.attention.key_length", hidden // heads)
    fields.refuse_unless(f"{family}.attention.value_length", (head_dim,), "key_length differs")
    fields.refuse_unless(f"{family}.rope.dimension_count", (head_dim,), "the whole head rotates")
    layers, first = fields.integer(f"{family}.block_count"), "blk.0"
    if layers > len(file.tensors):
        raise CheckpointError(
            f"{file.path.name}: {family}.block_count is {layers}, but the file holds "
            f"{len(file.tensors)} tensors"
        )
    spec = ModelSpec(
        architecture=family,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=fields.integer(f"{family}.attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate=fields.integer(f"{family}.feed_forward_length"),
        vocab=_vocab(file),
        max_position=fields.integer(f"{family}.context_length"),
        rms_eps=fields.number(f"{family}.attention.layer_norm_rms_epsilon"),
        rope=_rope(file, fields, family, head_dim),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias=f"{first}.attn_q.bias" in file.tensors,
        output_bias=f"{first}.attn_output.bias" in file.tensors,
        mlp_bias=f"{first}.ffn_down.bias" in file.tensors,
        qk_norm=family == "qwen3",
        windows=(None,) * layers,
        stop_ids=end_token_ids(fields),
        bos_id=next(iter(token_ids(fields, "bos_token_id")), None),
    )
    check_shape(spec)
    if taken := fields.defaults((f"{family}.rope.freq_base",)):
        logger.warning("%s leaves something out; taking %s", file.path.name, taken)
    return spec


def _vocab(file: GGUFFile) -> int:
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise CheckpointError(f"{file.path}: tensor token_embd.weight is missing")
    return table.shape[0]


def _rope(file: GGUFFile, fields: Fields, family: str, head_dim: int) -> RopeSpec:
    at = f"{family}.rope."
    keys = fields.keys()
    for key in keys:
        if key.startswith(at) and key.removeprefix(at) not in _ROPE_KEYS:
            raise UnsupportedError(f"{file.path.name}: unknown key {key} about rotation")
    theta = fields.number(f"{at}freq_base", 10_000.0, above=1.0, most=MOST_OF_ROPE)
    base = RopeSpec(theta=theta, dim=head_dim)
    scaling = f"{family}.rope.scaling"
    kind = fields.text(f"{scaling}.type", "linear")
    if ROPE_FACTORS in file.tensors:
        fields.refuse_unless(f"{scaling}.type", ("none",), f"{ROPE_FACTORS} scales already")
        return replace(base, kind="factors", factors=_rope_factors(file, head_dim // 2))
    if kind == "yarn":
        for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
            fields.refuse_unless(f"{scaling}.{key}", (1.0,), "YaRN is computed with factors of 1")
        return replace(
            base,
            kind="yarn",
            factor=fields.number(f"{scaling}.factor", most=MOST_OF_ROPE),
            original_max_position=fields.integer(f"{scaling}.original_context_length"),
            beta_fast=fields.number(f"{scaling}.yarn_beta_fast", 32.0, most=MOST_OF_ROPE),
            beta_slow=fields.number(f"{scaling}.yarn_beta_slow", 1.0, most=MOST_OF_ROPE),
        )
    fields.refuse_unless(f"{scaling}.type", ("none", "linear"), "types: none, yarn")
    if kind == "linear":
        fields.refuse_unless(f"{scaling}.factor", (0.0, 1.0), "positions are not scaled linearly")
        fields.refuse_unless(
            f"{family}.rope.scale_linear", (0.0, 1.0), "positions are not scaled linearly"
        )
    return base


def _rope_factors(file: GGUFFile, pairs: int) -> tuple[float, ...]:
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.shape != (pairs,) or tensor.type != 0:
        raise CheckpointError(
            f"{file.path.name}: {ROPE_FACTORS} is {TYPES[tensor.type].name} "
            f"{list(tensor.shape)}, not F32 [{pairs}]"
        )
    return struct.unpack(f"<{pairs}f", file.raw(ROPE_FACTORS))
