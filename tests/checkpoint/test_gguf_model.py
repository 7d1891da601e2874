"""A GGUF file gives the logits of the same numbers in a Hugging Face checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from bifolio.checkpoint.gguf import GGUFFile
from bifolio.checkpoint.load import Model, load_models
from bifolio.checkpoint.source import resolve_source
from bifolio.errors import CheckpointError, UnsupportedError
from bifolio.formats import PrecisionPlan, WeightFormat
from bifolio.kernels.ops import Ops, Weight
from bifolio.kernels.reference import ReferenceOps
from bifolio.quant.quant_tensor import QuantTensor
from support.forward import PagedRun
from support.gguf_files import TypeOf, write_gguf
from support.tiny import LLAMA3_ROPE, YARN_ROPE, tiny_config, write_model, write_weights

FP32 = PrecisionPlan.parse("fp32/fp32")
IDS = [5, 300, 17, 42, 42, 8, 99, 250, 1, 0, 77, 31, 30, 29, 28, 27, 26, 25, 24, 23]


def all_of(kind: Type) -> TypeOf:
    return lambda _name: kind


def mixed(name: str) -> Type:
    """What quantisers do: a finer type for some matrices, in the middle of a fused weight too."""
    if "v_proj" in name or "embed" in name:
        return Type.Q8_0
    return Type.Q5_0 if "down" in name else Type.Q4_1


def load(path: Path, plan: PrecisionPlan = FP32, ops: Ops | None = None) -> Model:
    return load_models(resolve_source(str(path)), plan, ops or ReferenceOps()).decode


def logits(model: Model) -> torch.Tensor:
    return PagedRun(model).step({"a": IDS})["a"]


def twin(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Model:
    """The Hugging Face checkpoint that holds the same numbers."""
    write_model(folder, config, tokenizer=False)
    write_weights(folder, weights)
    return load(folder)


WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 1}
MODELS: dict[str, tuple[dict[str, Any], TypeOf]] = {
    "llama F32": (tiny_config("llama"), all_of(Type.F32)),
    "llama F16": (tiny_config("llama"), all_of(Type.F16)),
    "llama BF16": (tiny_config("llama"), all_of(Type.BF16)),
    "llama Q4_0": (tiny_config("llama", tie_word_embeddings=True), all_of(Type.Q4_0)),
    "llama Q4_1": (tiny_config("llama"), all_of(Type.Q4_1)),
    "llama Q8_0": (tiny_config("llama"), all_of(Type.Q8_0)),
    "llama mixed": (tiny_config("llama", tie_word_embeddings=True), mixed),
    "llama biases": (tiny_config("llama", attention_bias=True), all_of(Type.Q8_0)),
    "qwen2 Q4_1": (tiny_config("qwen2"), all_of(Type.Q4_1)),
    "qwen3 Q8_0": (tiny_config("qwen3", tie_word_embeddings=True), all_of(Type.Q8_0)),
    "llama Q2_K": (tiny_config("llama", **WIDE), all_of(Type.Q2_K)),
    "llama Q3_K": (tiny_config("llama", **WIDE), all_of(Type.Q3_K)),
    "qwen2 Q4_K": (tiny_config("qwen2", **WIDE), all_of(Type.Q4_K)),
    "qwen3 Q5_K": (tiny_config("qwen3", **WIDE), all_of(Type.Q5_K)),
    "llama Q6_K": (tiny_config("llama", **WIDE), all_of(Type.Q6_K)),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_the_same_numbers_in_a_hugging_face_checkpoint(
    name: str, tmp_path: Path
) -> None:
    config, type_of = MODELS[name]
    held = write_gguf(tmp_path / "model.gguf", config, type_of)
    wanted = logits(twin(tmp_path / "twin", config, held))
    assert wanted.std() > 0.1
    assert torch.equal(logits(load(tmp_path / "model.gguf")), wanted)


class Seen(ReferenceOps):
    """Notes the formats that it is given, and refuses some."""

    def __init__(self, *refused: str) -> None:
        self._refused = {WeightFormat.parse(name) for name in refused}
        self.formats: list[str] = []
        self.weights: list[QuantTensor] = []

    def prepare(self, weight: QuantTensor, bias_n: torch.Tensor | None = None) -> Weight:
        if weight.format in self._refused:
            raise UnsupportedError(f"no kernel for {weight.format}")
        self.formats.append(str(weight.format))
        self.weights.append(weight)
        return super().prepare(weight, bias_n)


AUTO = PrecisionPlan.parse("auto/fp32")


def test_auto_keeps_the_bits_of_the_file_and_meets_in_bf16_where_parts_differ(
    tmp_path: Path,
) -> None:
    config = tiny_config("llama", tie_word_embeddings=True, num_hidden_layers=1)
    write_gguf(tmp_path / "model.gguf", config, mixed)
    ops = Seen()
    load(tmp_path / "model.gguf", AUTO, ops)
    #                   embedding    q, k, v  output        gate, up      down
    assert ops.formats == ["int8:g32", "bf16", "int4:g32:z", "int4:g32:z", "bf16"]


def test_auto_falls_back_to_bf16_where_the_kernels_lack_a_format(tmp_path: Path) -> None:
    config = tiny_config("llama", num_hidden_layers=1)
    write_gguf(tmp_path / "model.gguf", config, all_of(Type.Q4_0))
    ops = Seen("int4:g32")
    load(tmp_path / "model.gguf", AUTO, ops)
    assert set(ops.formats) == {"bf16"}
    with pytest.raises(UnsupportedError, match="int4:g32"):
        load(tmp_path / "model.gguf", PrecisionPlan.parse("int4:g32/fp32"), ops)


def test_a_plan_that_only_adds_int8_activations_keeps_the_bits_too(tmp_path: Path) -> None:
    config = tiny_config("llama", num_hidden_layers=1)
    write_gguf(tmp_path / "model.gguf", config, all_of(Type.Q4_1))
    stored, a8 = Seen(), Seen()
    load(tmp_path / "model.gguf", AUTO, stored)
    load(tmp_path / "model.gguf", PrecisionPlan.parse("int4:g32:z:a8/fp32"), a8)
    assert set(a8.formats) == {"int4:g32:z:a8"}
    for one, other in zip(stored.weights, a8.weights, strict=True):
        assert torch.equal(one.codes, other.codes)
        assert torch.equal(one.scales, other.scales)
        assert torch.equal(one.offsets, other.offsets)


def llama3_factors(rope: dict[str, Any], dim: int) -> list[float]:
    """What converters store for Llama 3.1, pair by pair."""
    factors = []
    for pair in range(dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * pair / dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        keep = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - keep) / rope["factor"] + keep))
    return factors


def test_rope_factors_of_the_file_are_the_llama3_scaling(tmp_path: Path) -> None:
    config = tiny_config("llama", rope_parameters=LLAMA3_ROPE)
    factors = llama3_factors(LLAMA3_ROPE, config["head_dim"])
    assert 1.0 in factors
    assert 8.0 in factors
    held = write_gguf(tmp_path / "m.gguf", config, all_of(Type.F32), rope_factors=factors)
    wanted = logits(twin(tmp_path / "twin", config, held))
    assert (logits(load(tmp_path / "m.gguf")) - wanted).abs().max() < 1e-4
    plain = twin(tmp_path / "plain", tiny_config("llama"), held)
    assert (logits(plain) - wanted).abs().max() > 0.01
    write_gguf(tmp_path / "short.gguf", config, all_of(Type.F32), rope_factors=factors[1:])
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight.*\[7\], not F32 \[8\]"):
        load(tmp_path / "short.gguf")


def test_yarn_of_the_metadata_is_yarn(tmp_path: Path) -> None:
    config = tiny_config("qwen2", rope_parameters=YARN_ROPE)
    held = write_gguf(
        tmp_path / "model.gguf",
        config,
        all_of(Type.F32),
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=64,
    )
    wanted = logits(twin(tmp_path / "twin", config, held))
    assert torch.equal(logits(load(tmp_path / "model.gguf")), wanted)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"rope__scaling__type": "longrope"}, "rope.scaling.type"),
        ({"rope__scaling__factor": 2.0}, "rope.scaling.factor"),
        ({"rope__scale_linear": 2.0}, "rope.scale_linear"),
        ({"attention__sliding_window": 4096}, "attention.sliding_window"),
        ({"expert_count": 8}, "expert_count"),
        ({"rope__dimension_count": 8}, "rope.dimension_count"),
    ],
)
def test_metadata_that_changes_the_numbers_is_refused_by_name(
    extra: dict[str, Any], named: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_config("llama"), all_of(Type.F32), **extra)
    with pytest.raises(UnsupportedError, match=named):
        load(tmp_path / "m.gguf")


def test_an_unknown_tensor_and_a_missing_one_are_refused_by_name(tmp_path: Path) -> None:
    config = tiny_config("qwen2")
    write_gguf(tmp_path / "m.gguf", config, all_of(Type.F32))
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "odd.gguf").write_bytes(data.replace(b"blk.3.attn_q.bias", b"blk.3.attn_x.bias"))
    with pytest.raises(CheckpointError, match=r"missing.*layers\.3\.self_attn\.q_proj\.bias"):
        load(tmp_path / "odd.gguf")
    write_gguf(tmp_path / "m.gguf", config | {"num_hidden_layers": 5}, all_of(Type.F32))
    data = (tmp_path / "m.gguf").read_bytes()
    key = b"qwen2.block_count" + (4).to_bytes(4, "little")
    assert key in data
    four = key + (4).to_bytes(4, "little")
    (tmp_path / "odd.gguf").write_bytes(data.replace(key + (5).to_bytes(4, "little"), four))
    with pytest.raises(CheckpointError, match=r"no use.*layers\.4\."):
        load(tmp_path / "odd.gguf")


def test_end_tokens_are_the_union_of_those_in_the_metadata(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_config("llama"), all_of(Type.F32))
    assert resolve_source(str(tmp_path / "m.gguf")).spec.stop_ids == (2, 0)
    assert GGUFFile(tmp_path / "m.gguf").metadata["general.architecture"] == "llama"


def test_an_end_token_of_minus_one_means_that_there_is_none(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_config("llama"), all_of(Type.F32))
    data = (tmp_path / "m.gguf").read_bytes()
    at = data.index(b"tokenizer.ggml.eot_token_id") + len(b"tokenizer.ggml.eot_token_id") + 4
    (tmp_path / "none.gguf").write_bytes(data[:at] + b"\xff" * 4 + data[at + 4 :])
    assert resolve_source(str(tmp_path / "none.gguf")).spec.stop_ids == (2,)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        (b"llama.block_count", 2**32 - 1, "llama.block_count is 4294967295"),
        (b"tokenizer.ggml.eot_token_id", 2**32 - 2, "end token 4294967294 is none of"),
    ],
)
def test_numbers_far_beyond_the_file_are_refused_before_they_are_used(
    key: bytes, value: int, named: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_config("llama"), all_of(Type.F32))
    data = (tmp_path / "m.gguf").read_bytes()
    at = data.index(key) + len(key) + 4  # behind the type of the entry
    (tmp_path / "odd.gguf").write_bytes(data[:at] + value.to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(CheckpointError, match=named):
        load(tmp_path / "odd.gguf")


def test_tables_of_rotation_that_converters_of_llama_wrote_are_passed_over(tmp_path: Path) -> None:
    config = tiny_config("llama", num_hidden_layers=1)
    held = write_gguf(tmp_path / "m.gguf", config, all_of(Type.F32), buffers=True)
    assert "blk.0.attn_rot_embd.weight" in GGUFFile(tmp_path / "m.gguf").tensors
    wanted = logits(twin(tmp_path / "twin", config, held))
    assert torch.equal(logits(load(tmp_path / "m.gguf")), wanted)


def test_a_file_that_is_cut_while_it_loads_is_an_error_and_no_signal(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_config("llama"), all_of(Type.F32))
    source = resolve_source(str(path))
    assert source.spec.layers == 4
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"m\.gguf ends at byte"):
        load_models(source, FP32, ReferenceOps())
