"""A GGUF file as a checkpoint: its tensors by their Hugging Face names.

Converters to GGUF reorder the rows of q and k of the `llama` architecture from halves to
neighbouring pairs, because ggml rotates those; here that is undone, on quantised rows too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bifolio.checkpoint.gguf import FLOATS, KEPT, TYPES, GGUFFile
from bifolio.checkpoint.gguf_blocks import matrix_format, read_matrix, read_values
from bifolio.checkpoint.gguf_spec import ROPE_FACTORS
from bifolio.checkpoint.tensor_files import read_tensor
from bifolio.quant.quant_tensor import QuantTensor
from bifolio.spec import ModelSpec
from bifolio.spec.quantization import StoredMatrix
from bifolio.spec.weights import WeightMatrix

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


class GGUFCheckpoint:
    """The tensors of a GGUF file under their Hugging Face names, rows in their order."""

    def __init__(self, file: GGUFFile, spec: ModelSpec) -> None:
        self._file = file
        self._spec = spec
        beside = {ROPE_FACTORS, *_buffers(spec)}
        self._stored = {_hf_name(name): name for name in file.tensors if name not in beside}
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: file.tensors[stored].shape for name, stored in self._stored.items()
        }

    def matrix(self, name: str) -> QuantTensor:
        tensor = self._file.tensors[self._stored[name]]
        n, k = tensor.shape
        stored = read_matrix(self._raw(name), tensor.type, n, k)
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
        values = read_values(self._raw(name), self._file.tensors[self._stored[name]].type)
        rows = self._rows(name, values.shape[0])
        return values if rows is None else values[rows]

    def stored_matrix(self, name: str) -> StoredMatrix:
        return StoredMatrix(matrix_format(self._file.tensors[self._stored[name]].type))

    def stack_as_stored(self, names: Sequence[str]) -> bool:  # noqa: ARG002
        return True

    def is_ignorable(self, name: str) -> bool:  # noqa: ARG002
        return False

    def widened(self, matrices: Iterable[WeightMatrix]) -> tuple[str, ...]:
        """Quantised types among these matrices that `auto` cannot keep, so that they become bf16.

        Those of which `KEPT` has no format, and those that share a matrix with another type.
        """
        found: set[str] = set()
        for matrix in matrices:
            names = (self._stored[f"{part}.weight"] for part, _ in matrix.parts)
            types = {TYPES[self._file.tensors[name].type].name for name in names}
            if len(types) > 1 or not types <= KEPT.keys():
                found |= types.difference(FLOATS)
        return tuple(sorted(found))

    def size(self, name: str) -> int:
        return self._file.tensors[self._stored[name]].nbytes

    def piece(self, name: str, start: int, count: int) -> bytes:
        return self._file.file.read(self._file.tensors[self._stored[name]].offset + start, count)

    def _raw(self, name: str) -> Tensor:
        tensor = self._file.tensors[self._stored[name]]
        return read_tensor(self._file.file, tensor.offset, tensor.nbytes)

    def _rows(self, name: str, n: int) -> Tensor | None:
        """Where each row of q or k stands in the file: pairs (i, i + d/2) are neighbours there."""
        if self._spec.architecture != "llama" or not re.search(r"\.[qk]_proj\.", name):
            return None
        pairs = self._spec.head_dim // 2
        return torch.arange(n).view(-1, pairs, 2).transpose(1, 2).reshape(n)


def _buffers(spec: ModelSpec) -> Iterable[str]:
    """Tables of rotation that follow from the metadata; converters of Llama once wrote them."""
    layers = spec.layers if spec.architecture == "llama" else 0
    return (f"blk.{i}.attn_rot_embd.weight" for i in range(layers))


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; others stay as they are."""
    part, _, kind = name.rpartition(".")
    if part in _GLOBAL_PARTS:
        return f"{_GLOBAL_PARTS[part]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", part)
    if match and match[2] in _LAYER_PARTS:
        return f"model.layers.{match[1]}.{_LAYER_PARTS[match[2]]}.{kind}"
    return name
