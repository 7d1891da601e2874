"""A GGUF file as a checkpoint: its metadata → ModelSpec, its tensors by their Hugging Face names.

Converters to GGUF reorder the rows of q and k of the `llama` architecture from halves to
neighbouring pairs, because ggml rotates those; here that is undone, on quantised rows too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from bifolio.errors import CheckpointError, UnsupportedError
from bifolio.kernels.tensor import QuantTensor
from bifolio.models.families import FAMILIES
from bifolio.models.gguf import GGUFFile
from bifolio.models.gguf_blocks import read_matrix, read_values
from bifolio.spec import ModelSpec, RopeSpec
from bifolio.spec.fields import Fields
from bifolio.spec.hf import check_shape

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor that divides the frequency of each rotated pair; it belongs to the spec."""

_GLOBAL_PARTS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def gguf_spec(file: GGUFFile) -> ModelSpec:
    """ModelSpec of a GGUF file; UnsupportedError and CheckpointError name the metadata key."""
    fields = Fields(file.metadata, file.path.name)
    family = fields.text("general.architecture")
    if family not in FAMILIES:
        raise UnsupportedError(
            f"{file.path.name}: general.architecture={family!r} is not supported; "
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
        stop_ids=tuple(i for key in _END_KEYS for i in fields.ids(f"tokenizer.ggml.{key}")),
        bos_id=next(iter(fields.ids("tokenizer.ggml.bos_token_id")), None),
    )
    check_shape(spec)
    return spec


class GGUFCheckpoint:
    """The tensors of a GGUF file under their Hugging Face names, rows in their order."""

    def __init__(self, file: GGUFFile, spec: ModelSpec) -> None:
        self._file = file
        self._spec = spec
        self._stored = {_hf_name(name): name for name in file.tensors if name != ROPE_FACTORS}
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: file.tensors[stored].shape for name, stored in self._stored.items()
        }

    def matrix(self, name: str) -> QuantTensor:
        tensor = self._file.tensors[self._stored[name]]
        n, k = tensor.shape
        stored = read_matrix(self._file.raw(self._stored[name]), tensor.type, n, k)
        rows = self._rows(name, n)
        if rows is None:
            return stored
        return replace(
            stored,
            codes=stored.codes[rows],
            scales=None if stored.scales is None else stored.scales[rows],
            offsets=None if stored.offsets is None else stored.offsets[rows],
        )

    def vector(self, name: str) -> Tensor:
        stored = self._stored[name]
        values = read_values(self._file.raw(stored), self._file.tensors[stored].type)
        rows = self._rows(name, values.shape[0])
        return values if rows is None else values[rows]

    def _rows(self, name: str, n: int) -> Tensor | None:
        """Where each row of q or k stands in the file: pairs (i, i + d/2) are neighbours there."""
        if self._spec.architecture != "llama" or not re.search(r"\.[qk]_proj\.", name):
            return None
        pairs = self._spec.head_dim // 2
        return torch.arange(n).view(-1, pairs, 2).transpose(1, 2).reshape(n)


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; others stay as they are."""
    part, _, kind = name.rpartition(".")
    if part in _GLOBAL_PARTS:
        return f"{_GLOBAL_PARTS[part]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", part)
    if match and match[2] in _LAYER_PARTS:
        return f"model.layers.{match[1]}.{_LAYER_PARTS[match[2]]}.{kind}"
    return name


def _vocab(file: GGUFFile) -> int:
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise CheckpointError(f"{file.path}: tensor token_embd.weight is missing")
    return table.shape[0]


def _rope(file: GGUFFile, fields: Fields, family: str, head_dim: int) -> RopeSpec:
    base = RopeSpec(theta=fields.number(f"{family}.rope.freq_base", 10_000.0), dim=head_dim)
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
            factor=fields.number(f"{scaling}.factor"),
            original_max_position=fields.integer(f"{scaling}.original_context_length"),
            beta_fast=fields.number(f"{scaling}.yarn_beta_fast", 32.0),
            beta_slow=fields.number(f"{scaling}.yarn_beta_slow", 1.0),
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
    if tensor.shape != (pairs,):
        raise CheckpointError(
            f"{file.path.name}: {ROPE_FACTORS} has shape {list(tensor.shape)}, not [{pairs}]"
        )
    return tuple(read_values(file.raw(ROPE_FACTORS), tensor.type).tolist())
