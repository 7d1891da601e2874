"""Write a random Kimi K2.6 of true width: `make_random_kimi.py FOLDER`.

Its first layer is dense, the others have experts in int4 with groups of 32, and embeddings and head
are the true ones, in bf16: 15.6 GB with two layers. Names, types and shapes are those of the
published checkpoint (compressed-tensors, under `language_model.`); --experts, --layers and --vocab
make it smaller or deeper. The numbers are random, of the
size that keeps activations near one, so the text that it writes means nothing. Written tensor by
tensor, in 3 GB of memory.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bifolio.checkpoint.safetensors_folder import INDEX
from bifolio.formats import WeightFormat
from bifolio.lab.compress.coded import Stored, stored_tensors
from bifolio.lab.compress.output_files import TensorFile, write_json
from bifolio.lab.compress.shard_layout import ITEM_BYTES
from bifolio.lab.plan.presets import PRESETS
from bifolio.spec.config_json import read_config
from bifolio.spec.families.registry import FAMILIES

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.tiny import write_tokenizer

FORMAT = WeightFormat.parse("int4:g32")
SHARD_BYTES = 2 * 10**9
CHUNK = 1 << 24
"""Numbers that are drawn at a time."""


@dataclass(frozen=True)
class RandomPart:
    """A tensor of the files, and the shape of the parameter that it is of."""

    stored: Stored
    of: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.stored.shape) * ITEM_BYTES[self.stored.dtype]


def config_of(experts: int, layers: int, vocab: int) -> dict[str, Any]:
    preset = dict(PRESETS["kimi-k2.6"].config)
    inner = preset | {"num_hidden_layers": layers, "n_routed_experts": experts}
    inner |= {"vocab_size": vocab}
    return {"model_type": "kimi_k25", "text_config": inner, "eos_token_id": 2, "bos_token_id": 0}


def parts_of(config: dict[str, Any]) -> Iterator[RandomPart]:
    """Every tensor, under its published name, in the order of the network."""
    spec = read_config(config)
    items = FAMILIES[spec.architecture](spec).all()
    shapes = {name: shape for item in items for name, shape in item.shapes()}
    for name, shape in shapes.items():
        at = f"language_model.{name}".removesuffix("weight")
        if ".experts." in name:
            for one in stored_tensors(FORMAT, shape[0], shape[1], "BF16"):
                yield RandomPart(Stored(f"{at}{one.name}", one.dtype, one.shape), shape)
        else:
            dtype = "F32" if name.endswith("e_score_correction_bias") else "BF16"
            yield RandomPart(Stored(f"language_model.{name}", dtype, shape), shape)


def shards_of(parts: list[RandomPart]) -> list[list[RandomPart]]:
    """Tensors in order, a new file where the next would not fit."""
    shards: list[list[RandomPart]] = [[]]
    size = 0
    for part in parts:
        if shards[-1] and size + part.nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(part)
        size += part.nbytes
    return shards


def draw(part: RandomPart, generator: torch.Generator) -> Tensor:
    """The numbers of one tensor."""
    stored, k = part.stored, part.of[-1]
    if stored.dtype == "I64":
        return torch.tensor(part.of)
    if stored.dtype == "I32":
        return torch.randint(-(2**31), 2**31, stored.shape, dtype=torch.int32, generator=generator)
    if stored.dtype == "F32":
        return 0.01 * torch.randn(stored.shape, generator=generator)
    if stored.name.endswith("weight_scale"):  # codes of all values alike spread as 4.6
        scales = torch.rand(stored.shape, generator=generator).add_(0.5)
        return scales.div_(4.6 * k**0.5).to(torch.bfloat16)
    if stored.name.endswith("norm.weight"):
        return torch.ones(stored.shape, dtype=torch.bfloat16)
    numbers = torch.empty(prod(stored.shape), dtype=torch.bfloat16)
    for chunk in numbers.split(CHUNK):
        chunk.copy_(torch.randn(chunk.shape, generator=generator).div_(k**0.5))
    return numbers.view(stored.shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experts", type=int, default=384)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=163840)
    args = parser.parse_args()
    config = config_of(args.experts, args.layers, args.vocab)
    parts = list(parts_of(config))
    total = sum(part.nbytes for part in parts)
    args.folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(args.folder).free
    if total > free:
        sys.exit(f"{args.folder} has {free / 1e9:.1f} GB free, and the model has {total / 1e9:.1f}")
    generator = torch.Generator().manual_seed(0)
    shards = shards_of(parts)
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        with TensorFile(args.folder / name, [part.stored for part in shard]) as file:
            for part in shard:
                file.put(part.stored.name, draw(part, generator))
            file.commit()
        weight_map |= {part.stored.name: name for part in shard}
        print(f"{name}: {sum(part.nbytes for part in shard) / 1e9:.2f} GB", flush=True)
    write_json(args.folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    write_json(args.folder / "config.json", config)
    write_tokenizer(args.folder, args.vocab)
    print(f"{args.folder}: {len(parts):,} tensors, {total / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
