"""Llama: rotation, grouped queries, SwiGLU; biases where the configuration has them.

SmolLM2 and many others use it too. Tensor names are those of Hugging Face checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bifolio.spec import ModelSpec
from bifolio.spec.weights import (
    AttentionTensors,
    Cut,
    Gain,
    Kind,
    LayerTensors,
    MLPTensors,
    ModelTensors,
    WeightMatrix,
)


def llama_tensors(spec: ModelSpec) -> ModelTensors:
    """The weights of a Llama of this shape."""
    return decoder_tensors(spec, _layer)


def decoder_tensors(
    spec: ModelSpec, layer: Callable[[ModelSpec, int], LayerTensors]
) -> ModelTensors:
    """The weights of a decoder with such layers."""

    def table(part: str, kind: Kind) -> WeightMatrix:
        return WeightMatrix(((part, spec.vocab),), spec.hidden, kind, Cut.ROWS)

    return ModelTensors(
        embedding=table("model.embed_tokens", Kind.EMBEDDING),
        layers=tuple(layer(spec, i) for i in range(spec.layers)),
        norm=Gain("model.norm", spec.hidden),
        head=table("lm_head", Kind.HEAD),
        tied=spec.tie_embeddings,
        buffers=frozenset(_buffers(spec)),
    )


def _buffers(spec: ModelSpec) -> Iterator[str]:
    """What some trainers save beside the parameters: they save every buffer of the modules.

    Modelling code has kept the tables of rotation in each layer or once for all, and the mask once.
    """
    layers = (f"model.layers.{i}.self_attn" for i in range(spec.layers + spec.mtp_layers))
    for at in ("model", *layers):
        for table in ("inv_freq", "original_inv_freq", "cos_cached", "sin_cached"):
            yield f"{at}.rotary_emb.{table}"
    yield "model.causal_mask"


def _layer(spec: ModelSpec, index: int) -> LayerTensors:
    at = f"model.layers.{index}"
    return LayerTensors(llama_attention(spec, at), llama_mlp(spec, at))


def llama_attention(spec: ModelSpec, at: str) -> AttentionTensors:
    """Grouped-query attention of the layer whose tensor names begin with `at`."""
    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    qkv = (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows))
    parts = tuple((f"{at}.self_attn.{part}", rows) for part, rows in qkv)
    output = ((f"{at}.self_attn.o_proj", spec.hidden),)
    kind = Kind.ATTENTION
    return AttentionTensors(
        norm=Gain(f"{at}.input_layernorm", spec.hidden),
        qkv=WeightMatrix(parts, spec.hidden, kind, Cut.ROWS, bias=spec.qkv_bias),
        output=WeightMatrix(output, q_rows, kind, Cut.COLUMNS, bias=spec.output_bias),
    )


def llama_mlp(spec: ModelSpec, at: str) -> MLPTensors:
    """The dense MLP of that layer."""
    norm = Gain(f"{at}.post_attention_layernorm", spec.hidden)
    gate_up, down = gated(
        f"{at}.mlp", spec.hidden, spec.intermediate, Kind.DENSE_MLP, bias=spec.mlp_bias
    )
    return MLPTensors(norm, gate_up, down)


def gated(
    at: str, hidden: int, width: int, kind: Kind, *, bias: bool = False
) -> tuple[WeightMatrix, WeightMatrix]:
    """Gate beside up, and down, of a gated MLP of that width whose names begin with `at`."""
    gate_up = tuple((f"{at}.{part}_proj", width) for part in ("gate", "up"))
    down = ((f"{at}.down_proj", hidden),)
    return (
        WeightMatrix(gate_up, hidden, kind, Cut.ROWS, bias=bias, gated=True),
        WeightMatrix(down, width, kind, Cut.COLUMNS, bias=bias),
    )
