"""Tiny random models on disk, with a tokenizer, so that every path can be tried in milliseconds.

The scale of the weights is such that every block moves the logits: a swap of gate and up, a wrong
window or a forgotten bias is far above rounding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from bifolio.checkpoint.safetensors_folder import INDEX
from bifolio.spec.config_json import read_config
from bifolio.spec.families.registry import FAMILIES

VOCAB = 320
END_OF_TEXT, IM_START, IM_END = 0, 1, 2
"""Ids of the special tokens of the tiny tokenizer."""

_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_CORPUS = ["the capital of the country is in the north and the river runs to the sea " * 4]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
}
_EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 3, "norm_topk_prob": True}
_LATENT = _EXPERTS | {
    "num_key_value_heads": 4,
    "head_dim": 16,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "rope_interleave": True,
}
_INDEXED = {"index_n_heads": 16, "index_head_dim": 32, "index_topk": 24}
_FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},
    "qwen3_moe": _EXPERTS | {"head_dim": 32, "num_experts": 8},
    "deepseek_v2": _LATENT | {"norm_topk_prob": False, "topk_method": "greedy"},
    "deepseek_v3": _LATENT,
    "kimi_k2": _LATENT,
    "glm_moe_dsa": _LATENT
    | _INDEXED
    | {"indexer_types": ["full", "shared", "full", "shared"], "num_nextn_predict_layers": 0},
}


def tiny_config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """A `config.json` of a family with small sizes, all of them different; `changes` win."""
    config: dict[str, Any] = {
        "model_type": family,
        "architectures": [_ARCHITECTURES[family]],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": False,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": IM_END,
        "torch_dtype": "float32",
    }
    return config | _FAMILY_SIZES.get(family, {}) | changes


def random_weights(
    config: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Every tensor that a checkpoint with this configuration holds, by name."""
    spec = read_config(config)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for weight in FAMILIES[spec.architecture](spec).all():
        for name, shape in weight.shapes():
            values = torch.randn(shape, generator=generator)
            if name.endswith("norm.weight"):
                values = 1 + 0.3 * values
            elif name.endswith("e_score_correction_bias"):
                weights[name] = 0.1 * values  # in float32, as published checkpoints keep it
                continue
            elif name.endswith(".weight") and "embed_tokens" not in name:
                values = values / shape[-1] ** 0.5
            weights[name] = values.to(dtype)
    return weights


def write_model(
    folder: Path,
    config: dict[str, Any],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    tokenizer: bool = True,
) -> Path:
    """Write a model as Hugging Face lays it out: config, weights in `shards` files, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": [IM_END, END_OF_TEXT]})
    write_weights(folder, random_weights(config, seed, dtype), shards)
    if tokenizer:
        write_tokenizer(folder, config["vocab_size"])
    return folder


def write_weights(folder: Path, weights: dict[str, Tensor], shards: int = 1) -> None:
    """Write `model.safetensors`, or `shards` files and their index, tensors dealt in turn."""
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        names = list(weights)[shard::shards]
        save_file({n: weights[n] for n in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    size = sum(tensor.nbytes for tensor in weights.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})


def write_tokenizer(folder: Path, vocab: int = VOCAB) -> None:
    """A byte-level BPE of `vocab` tokens with ChatML markers and a chat template."""
    build_tokenizer(vocab).save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": _SPECIAL[END_OF_TEXT],
            "eos_token": _SPECIAL[IM_END],
            "add_bos_token": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def build_tokenizer(vocab: int = VOCAB) -> Tokenizer:
    """The tiny tokenizer itself: every byte, a few merges, three special tokens.

    The ids up to `vocab` that this leaves get names, which no text is cut into: ids without a token
    are never sampled.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    settings = json.loads(tokenizer.to_str())
    ids = settings["model"]["vocab"]
    ids |= {f"<row{i}>": i for i in range(len(ids), vocab)}
    return Tokenizer.from_str(json.dumps(settings))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2))
