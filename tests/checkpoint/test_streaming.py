"""Loading streams: at its peak, memory holds what is kept and little more than one file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bifolio.checkpoint.checkpoint import identity
from bifolio.checkpoint.safetensors_folder import SafetensorsFolder
from bifolio.kernels.mapped_weights import MappedFile
from bifolio.spec.config_json import read_config
from support.checkpoint_layouts import LAYOUTS
from support.tiny import random_weights, tiny_config, write_model

MIB = 2**20
FILES = 3
SIZES = {"hidden_size": 512, "vocab_size": 32768, "num_experts": 16, "moe_intermediate_size": 768}
CONFIG = tiny_config("qwen3_moe", **SIZES)
CASES = (
    pytest.param("float32", "auto/bf16", marks=pytest.mark.soak),
    ("int4 in groups of 32", "auto/bf16"),
)
MEASURE = """
import json, sys
from bifolio.formats import PrecisionPlan
from bifolio.kernels.native import NativeOps
from bifolio.checkpoint.load import load_models
from bifolio.checkpoint.source import resolve_source

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

def load(folder, plan):
    source = resolve_source(folder)
    return load_models(source, PrecisionPlan.parse(plan), NativeOps(1), positions=64)

small, folder, plan = sys.argv[1:]
load(small, plan)  # what libraries take once
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak counts from here
before = status("VmRSS")
models = load(folder, plan)
print(json.dumps({"peak": status("VmHWM") - before, "kept": models.nbytes}))
"""


def coded(name: str, matrix: Tensor) -> dict[str, Tensor]:
    """Any int4 codes in groups of 32: what they mean does not matter here."""
    n, k = matrix.shape
    at = name.removesuffix(".weight")
    return {
        f"{at}.weight_packed": torch.randint(-(2**31), 2**31, (n, k // 8), dtype=torch.int32),
        f"{at}.weight_scale": torch.ones(n, k // 32, dtype=torch.bfloat16),
        f"{at}.weight_shape": torch.tensor([n, k]),
    }


def write(folder: Path, layout: str, weights: dict[str, Tensor]) -> int:
    """Files in the order of the network, as published ones are; bytes of the largest."""
    config: dict[str, Any] = dict(CONFIG)
    if layout != "float32":
        config["quantization_config"] = LAYOUTS[layout][0]
        parts = [
            coded(name, tensor) if name.endswith("proj.weight") else {name: tensor}
            for name, tensor in weights.items()
        ]
        weights = {name: tensor for part in parts for name, tensor in part.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    full = sum(tensor.nbytes for tensor in weights.values()) / FILES
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in weights.items():
        if sum(held.nbytes for held in shards[-1].values()) >= full:
            shards.append({})
        shards[-1][name] = tensor
    weight_map = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert len(shards) > 1
    return max(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return random_weights(CONFIG)


@pytest.mark.parametrize(("layout", "plan"), CASES)
def test_the_peak_is_below_what_is_kept_and_1_3_files(
    layout: str, plan: str, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    largest = write(tmp_path / "large", layout, weights)
    small = write_model(tmp_path / "small", tiny_config("qwen3_moe"), tokenizer=False)
    command = [sys.executable, "-c", MEASURE, str(small), str(tmp_path / "large"), plan]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seen = json.loads(done.stdout)
    told = f"peak {seen['peak'] / MIB:.0f}, kept {seen['kept'] / MIB:.0f}, file {largest / MIB:.0f}"
    assert seen["kept"] < seen["peak"], told
    assert seen["peak"] < seen["kept"] + 1.3 * largest, told


def test_naming_a_checkpoint_reads_samples_and_not_what_lies_around_them(tmp_path: Path) -> None:
    """Samples of every tensor, and the small ones whole: a few pages of each large one."""
    path, large = tmp_path / "model.safetensors", 8 * MIB
    tensors = {f"{i}.weight": torch.zeros(large, dtype=torch.int8) for i in range(4)}
    shapes = {f"{i}.weight_shape": torch.tensor([large, i]) for i in range(4)}
    save_file(tensors | shapes, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    mapped = MappedFile(path)
    if mapped.resident(0, mapped.nbytes) > large:
        pytest.skip("files of this folder lie in memory anyway")
    files = SafetensorsFolder(tmp_path)
    identity(read_config(tiny_config("llama")), files)
    assert [files.tensor(name).tolist() for name in shapes] == [[large, i] for i in range(4)]
    assert mapped.resident(0, mapped.nbytes) < 2 * large, "the header may bring some along"
