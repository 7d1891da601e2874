"""What we write, `transformers` with the compressed-tensors package loads, to the same logits.

That package decodes experts in the type of their scales, bf16. So the judge's experts are compared
with ours rounded to bf16, and its logits with those of our model of these very weights.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bifolio.checkpoint.source import resolve_source
from bifolio.lab.compress.source_model import SourceModel
from support.compressed_checkpoints import IDS, compress, logits, write_source
from support.tiny import write_weights

pytest.importorskip("compressed_tensors", reason="the judge is not installed")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # of the judge's own code


def judge(folder: Path) -> tuple[Any, Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model(torch.tensor([IDS]))  # decodes the weights
        for weight in model.parameters():
            weight.data = weight.data.float()
        found: Tensor = model(torch.tensor([IDS])).logits[0]
    return model, found


@pytest.mark.parametrize(
    "weights",
    ["int4:g32", "int4:g64", "int8", "fp8", "fp8:channel", "fp8:tensor"],
)
def test_logits_of_a_llama_agree(weights: str, tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    compress(source, tmp_path / "small", weights)
    ours = logits(tmp_path / "small")
    assert (judge(tmp_path / "small")[1] - ours).abs().max() < 1e-4
    assert (logits(source) - ours).abs().max() > 1e-2, "the bound would see other weights"


@pytest.mark.parametrize("weights", ["int4:g32:z", "int4:g128:z"])
def test_zero_points_mean_the_same(weights: str, tmp_path: Path) -> None:
    """Dequantised at load, since this version of the judge allots zero points unpacked before."""
    source = write_source(tmp_path / "source", hidden_size=128, head_dim=32)
    compress(source, tmp_path / "small", weights)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "small",
        dtype=torch.float32,
        quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
    )
    ours = SourceModel(resolve_source(str(tmp_path / "small")))
    for name, theirs in model.state_dict().items():
        if name.endswith("_proj.weight"):
            assert torch.equal(ours.numbers(name).bfloat16(), theirs.bfloat16()), name


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_experts_are_the_same_numbers_and_give_the_same_logits(family: str, tmp_path: Path) -> None:
    compress(write_source(tmp_path / "source", family), tmp_path / "small", "int4:g32")
    model, found = judge(tmp_path / "small")
    ours = SourceModel(resolve_source(str(tmp_path / "small")))
    theirs = separate(model.state_dict())
    weights = {}
    for name, shape in ours.shapes.items():
        mine = ours.numbers(name) if len(shape) == 2 else ours.vector(name)
        if ".mlp.experts." in name:
            mine = mine.bfloat16().float()
        assert torch.equal(mine, theirs[name].float()), name
        weights[name] = mine.contiguous()
    write_source(tmp_path / "means", family)
    for file in (tmp_path / "means").glob("*.safetensors*"):
        file.unlink()
    write_weights(tmp_path / "means", weights)
    assert (found - logits(tmp_path / "means")).abs().max() < 1e-4


def separate(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fused experts one by one."""
    found = {}
    for name, tensor in state.items():
        fused = re.fullmatch(r"(.+\.mlp\.experts)\.(gate_up|down)_proj", name)
        for expert in range(tensor.shape[0]) if fused else ():
            at = f"{fused[1]}.{expert}"
            if fused[2] == "down":
                found[f"{at}.down_proj.weight"] = tensor[expert]
            else:
                gate, up = tensor[expert].chunk(2)
                found |= {f"{at}.gate_proj.weight": gate, f"{at}.up_proj.weight": up}
        if not fused:
            found[name] = tensor
    return found
