"""Tiny models as GGUF files, written by the `gguf` package, which is the judge of our reader."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

from support.tiny import CHAT_TEMPLATE, END_OF_TEXT, IM_END, build_tokenizer, random_weights

TypeOf = Callable[[str], Type]
"""The type of a matrix, from its Hugging Face name."""

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    config: dict[str, Any],
    type_of: TypeOf,
    rope_factors: list[float] | None = None,
    buffers: bool = False,
    tokenizer: bool = False,
    **extra: Any,
) -> dict[str, torch.Tensor]:
    """Write a random model; returns the weights it holds after quantisation, as float32.

    `extra` are metadata entries of the architecture, `__` standing for a dot; with `buffers`, each
    layer has the table of rotation that old converters wrote, and with `tokenizer` there is that of
    `testing.tiny`.
    """
    family = config["model_type"]
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_eos_token_id(IM_END)
    writer.add_uint32("tokenizer.ggml.eot_token_id", END_OF_TEXT)
    for key, value in extra.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](f"{family}.{key.replace('__', '.')}", value)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, np.float32))
    if tokenizer:
        _add_tokenizer(writer)
    for layer in range(config["num_hidden_layers"] if buffers else 0):
        writer.add_tensor(f"blk.{layer}.attn_rot_embd.weight", np.ones(8, np.float32))
    held = {}
    for name, tensor in random_weights(config).items():
        values, kind = _store(tensor.numpy(), name, config, type_of)
        writer.add_tensor(stored_name(name), values, raw_dtype=kind)
        back = gguf.dequantize(values, kind).astype(np.float32).reshape(tensor.shape)
        held[name] = torch.from_numpy(_reorder(back, name, config, back=True))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    settings = json.loads(build_tokenizer().to_str())
    vocab: dict[str, int] = settings["model"]["vocab"]
    special = {token["id"] for token in settings["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocab, key=lambda token: vocab[token]))
    writer.add_token_types([3 if i in special else 1 for i in range(len(vocab))])
    writer.add_token_merges([" ".join(pair) for pair in settings["model"]["merges"]])
    writer.add_bos_token_id(END_OF_TEXT)
    writer.add_chat_template(CHAT_TEMPLATE)


def stored_name(name: str) -> str:
    part, _, kind = name.rpartition(".")
    if part.startswith("model.layers."):
        _, _, layer, inner = part.split(".", 3)
        return f"blk.{layer}.{NAMES[inner]}.{kind}"
    return f"{NAMES[part]}.{kind}"


def _store(
    values: np.ndarray, name: str, config: dict[str, Any], type_of: TypeOf
) -> tuple[np.ndarray, Type]:
    values = _reorder(values, name, config, back=False)
    kind = type_of(name) if values.ndim == 2 else Type.F32
    if kind is Type.F32:
        return values, kind
    if kind.name.endswith("_K"):
        return _random_blocks(values.shape, kind), kind
    return gguf.quantize(values, kind), kind


def _random_blocks(shape: tuple[int, ...], kind: Type) -> np.ndarray:
    """Random K-quant rows whose numbers are about 1 / sqrt(k); the package cannot encode them."""
    halves = {"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
    scale = {"Q2_K": 0.005, "Q3_K": 5e-4, "Q4_K": 2e-4, "Q5_K": 1e-4, "Q6_K": 5e-5}[kind.name]
    numbers, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(np.prod(shape)))
    raw = rng.integers(0, 256, (shape[0] * shape[1] // numbers, nbytes), dtype=np.uint8)
    for at in halves[kind.name]:
        raw[:, at : at + 2] = np.full((len(raw), 1), scale, np.float16).view(np.uint8)
    return raw.reshape(shape[0], -1)


def _reorder(values: np.ndarray, name: str, config: dict[str, Any], *, back: bool) -> np.ndarray:
    """Rows of q and k of a llama: halves to neighbouring pairs, as converters do, or back."""
    if config["model_type"] != "llama" or not ("q_proj" in name or "k_proj" in name):
        return values
    half = config["head_dim"] // 2
    sides = (half, 2) if back else (2, half)
    split = values.reshape(-1, *sides, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))
