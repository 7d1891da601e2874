"""Llama: rotation, grouped queries, SwiGLU; biases where the configuration has them.

SmolLM2 and many others use it too. Tensor names are those of Hugging Face checkpoints.
"""

from __future__ import annotations

from bifolio.models.tensors import Gain, LayerTensors, Matrix, ModelTensors
from bifolio.spec import ModelSpec


def llama_tensors(spec: ModelSpec) -> ModelTensors:
    """The weights of a Llama of this shape."""
    return ModelTensors(
        embedding=Matrix((("model.embed_tokens", spec.vocab),), spec.hidden),
        layers=tuple(llama_layer(spec, f"model.layers.{i}") for i in range(spec.layers)),
        norm=Gain("model.norm", spec.hidden),
        head=Matrix((("lm_head", spec.vocab),), spec.hidden),
        tied=spec.tie_embeddings,
        skipped=(".rotary_emb.inv_freq",),
    )


def llama_layer(spec: ModelSpec, at: str) -> LayerTensors:
    """The weights of the layer whose tensor names begin with `at`."""
    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    qkv = (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows))
    gate_up = (("gate_proj", spec.intermediate), ("up_proj", spec.intermediate))
    down, output = f"{at}.mlp.down_proj", f"{at}.self_attn.o_proj"
    return LayerTensors(
        attention_norm=Gain(f"{at}.input_layernorm", spec.hidden),
        qkv=Matrix(
            tuple((f"{at}.self_attn.{part}", rows) for part, rows in qkv),
            spec.hidden,
            bias=spec.qkv_bias,
        ),
        output=Matrix(((output, spec.hidden),), q_rows, bias=spec.output_bias),
        mlp_norm=Gain(f"{at}.post_attention_layernorm", spec.hidden),
        gate_up=Matrix(
            tuple((f"{at}.mlp.{part}", rows) for part, rows in gate_up),
            spec.hidden,
            bias=spec.mlp_bias,
        ),
        down=Matrix(((down, spec.hidden),), spec.intermediate, bias=spec.mlp_bias),
    )
