"""`bifolio plan DIR` counts, kind by kind, the very bytes that `bifolio serve DIR` holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from bifolio.checkpoint.load import load_models
from bifolio.checkpoint.source import resolve_source
from bifolio.cli.plan_model import find_model
from bifolio.errors import UnsupportedError
from bifolio.formats import PrecisionPlan
from bifolio.kernels.native import NativeOps
from bifolio.kernels.ops import Norm, Weight
from bifolio.lab.plan.capacity import Deployment
from bifolio.lab.plan.hardware import Device
from bifolio.layers.attention import Attention
from bifolio.layers.decoder import Decoder
from bifolio.layers.mla import MLAttention
from bifolio.layers.mlp import GatedMLP
from bifolio.layers.moe import MoE
from bifolio.spec.weights import Kind
from support.checkpoint_layouts import LAYOUTS, by_projection, fused, quantised
from support.compressed_checkpoints import compress, write_block_fp8, write_source
from support.gguf_files import write_gguf
from support.tiny import random_weights, tiny_config, write_model, write_weights

DEVICE = Device("small", 2**40, 1e9, 1e9)
LINEAR = r"_proj(_with_mqa)?\.weight$"
ODD = {"hidden_size": 160, "moe_intermediate_size": 144}
"""160 and 144 are no multiples of 128, and of 32 only the first."""
WIDE = {"hidden_size": 160, "moe_intermediate_size": 256}
"""Blocks of fp8 stay whole in the experts."""
PLANS = [
    "auto/bf16",
    "bf16/bf16",
    "fp8/bf16",
    "int4:g32:a8/bf16",
    "weights=fp8:tensor,head=int8",
    "weights=int8:g32,experts=int4:g64:z,head=bf16",
    "experts=int4:g32:a8",
    "head=int4:g128",
    "fp32/bf16",
]
GGUF_TYPES = [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_1, Type.Q8_0]


def resident(decoder: Decoder) -> dict[Kind, int]:
    """Bytes of every weight that a decoder holds, each once."""
    found = {id(part): (kind, part.nbytes) for kind, part in _held(decoder)}
    total: Counter[Kind] = Counter()
    for kind, nbytes in found.values():
        total[kind] += nbytes
    return dict(total)


def _held(decoder: Decoder) -> Iterator[tuple[Kind, Weight | Tensor]]:
    yield Kind.EMBEDDING, decoder.embedding
    if decoder.head is not decoder.embedding:
        yield Kind.HEAD, decoder.head
    yield Kind.NORMS, decoder.norm.gain_h
    for layer in decoder.layers:
        yield from _attention(layer.attention)
        yield Kind.NORMS, layer.mlp.norm.gain_h
        if isinstance(layer.mlp, MoE):
            yield from _moe(layer.mlp)
        else:
            yield from _gated(layer.mlp, Kind.DENSE_MLP)


def _attention(attention: Attention | MLAttention) -> Iterator[tuple[Kind, Weight | Tensor]]:
    norms: list[Norm | None] = [attention.norm, attention.q_norm]
    weights: list[Weight | None] = [attention.output]
    if isinstance(attention, Attention):
        norms += [attention.k_norm]
        weights += [attention.qkv]
    else:
        norms += [attention.kv_norm]
        weights += [attention.q_a, attention.q_b, attention.kv_a]
        weights += [*attention.k_up, *attention.v_up]
        if attention.indexer is not None:
            index = attention.indexer
            for part in (index.q, index.key, index.weights, index.key_gain_d, index.key_bias_d):
                yield Kind.INDEXER, part
    yield from ((Kind.NORMS, norm.gain_h) for norm in norms if norm is not None)
    yield from ((Kind.ATTENTION, weight) for weight in weights if weight is not None)


def _moe(moe: MoE) -> Iterator[tuple[Kind, Weight | Tensor]]:
    yield Kind.ROUTER, moe.router.weight
    if moe.router.bias_e is not None:
        yield Kind.ROUTER, moe.router.bias_e
    yield from ((Kind.ROUTED_EXPERTS, weight) for weight in (*moe.gate_up, *moe.down))
    if moe.shared is not None:
        yield from _gated(moe.shared, Kind.SHARED_EXPERTS)


def _gated(mlp: GatedMLP, kind: Kind) -> Iterator[tuple[Kind, Weight | Tensor]]:
    yield from ((kind, weight) for weight in (mlp.gate_up, mlp.down))


def check(path: Path, *plans: str) -> None:
    source, ops = resolve_source(str(path)), NativeOps(1)
    for text in plans:
        plan = PrecisionPlan.parse(text)
        models = load_models(source, plan, ops, positions=64)
        held = resident(models.decode.decoder)
        assert sum(held.values()) + models.decode.decoder.cos_sin_pd.nbytes == models.nbytes
        model = find_model(str(path), plan)
        planned = Deployment(model.spec, model.stored, DEVICE).weight_bytes(plan.decode)
        assert planned == held, text


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3_moe", {}),
        ("deepseek_v2", {"q_lora_rank": None}),
        ("deepseek_v3", ODD | {"num_nextn_predict_layers": 1}),
        ("kimi_k2", {"n_shared_experts": 2}),
        ("glm_moe_dsa", {}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_plan_counts_what_is_loaded_of_floats(
    family: str, changes: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    config = tiny_config(family, **changes)
    check(write_model(tmp_path / "m", config, dtype=dtype, tokenizer=False), *PLANS)


def write_layout(folder: Path, layout: str, which: str, **config: Any) -> Path:
    whole = tiny_config("deepseek_v3", quantization_config=LAYOUTS[layout][0], **config)
    stored, _ = quantised(random_weights(whole), layout, which)
    write_model(folder, whole, tokenizer=False)
    write_weights(folder, stored)
    return folder


@pytest.mark.parametrize("which", [LINEAR, r"mlp\.experts\."])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plan_counts_what_is_loaded_of_a_quantized_layout(
    layout: str, which: str, tmp_path: Path
) -> None:
    folder = write_layout(tmp_path / "m", layout, which, **ODD)
    check(folder, "auto/bf16", "int4:g32:a8/bf16", "experts=int8:g32", "head=int8")


@pytest.mark.parametrize("layout", ["fp8 in blocks", "int8 by channel", "int4 in groups of 32"])
def test_a_plan_counts_what_is_loaded_of_fused_experts(layout: str, tmp_path: Path) -> None:
    folder = write_layout(tmp_path / "m", layout, r"mlp\.experts\.", **WIDE)
    check(folder, "auto/bf16")
    whole = tiny_config("deepseek_v3", **WIDE)
    stored, _ = quantised(random_weights(whole), layout, r"mlp\.experts\.")
    write_weights(folder, fused(stored, transposed=False))
    check(folder, "auto/bf16", "weights=fp8,experts=int4:g32")


def test_a_plan_counts_what_is_loaded_of_experts_by_projection(tmp_path: Path) -> None:
    config = tiny_config("qwen3_moe")
    folder = write_model(tmp_path / "m", config, tokenizer=False)
    write_weights(folder, by_projection(random_weights(config)))
    check(folder, "auto/bf16")


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_a_plan_counts_what_is_loaded_of_a_gguf_file(
    kind: Type, mixed: bool, tmp_path: Path
) -> None:
    def type_of(name: str) -> Type:
        return Type.Q8_0 if mixed and ("v_proj" in name or "embed" in name) else kind

    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_config("llama"), type_of)
    check(path, "auto/bf16", "int4:g32/bf16", "head=int8")


@pytest.mark.parametrize("weights", ["int4:g32", "int8", "fp8:channel", "int4:g32:z"])
def test_a_plan_counts_what_is_loaded_of_a_compressed_checkpoint(
    weights: str, tmp_path: Path
) -> None:
    for family in ("llama", "glm_moe_dsa"):
        compress(write_source(tmp_path / family, family), tmp_path / f"{family}-small", weights)
        check(tmp_path / f"{family}-small", "auto/bf16", "weights=int8,head=bf16")


def test_a_plan_counts_what_is_loaded_of_published_block_fp8(tmp_path: Path) -> None:
    check(write_block_fp8(tmp_path / "m"), "auto/bf16", "experts=int4:g32")


def _without_weights(folder: Path) -> Path:
    return folder / "config.json"


@pytest.mark.parametrize("place", [lambda folder: folder, _without_weights])
def test_the_hint_of_an_unknown_method_can_be_followed(
    place: Callable[[Path], Path], tmp_path: Path
) -> None:
    unknown = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config = tiny_config("llama")
    folder = write_model(tmp_path / "m", config | {"quantization_config": unknown}, tokenizer=False)
    model = str(place(folder))
    with pytest.raises(UnsupportedError, match=r"'bitsandbytes'.*hint: --plan weights=FORMAT"):
        find_model(model, PrecisionPlan.parse("head=int8"))
    plan = PrecisionPlan.parse("weights=int4:g32")
    stored = find_model(model, plan)
    plain = find_model(
        str(write_model(tmp_path / "plain", config, tokenizer=False) / "config.json")
    )
    deployments = [Deployment(m.spec, m.stored, DEVICE) for m in (stored, plain)]
    assert len({str(d.weight_bytes(plan.decode)) for d in deployments}) == 1
