"""Puts static scales of the cache into a checkpoint: one small file more, named by the index.

`self_attn.k_scale` and `self_attn.v_scale` of each layer, float32: [kv_heads, 1, 1], or [1] where
all heads share one. `kv_cache_scheme` of compressed-tensors says so (strategies `attn_head` and
`tensor`); a checkpoint in floats gets a `quantization_config` with that alone. Other methods have
no word for it, and engines look for the tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bifolio.checkpoint.safetensors_folder import INDEX
from bifolio.checkpoint.source import ORIGIN
from bifolio.errors import CheckpointError
from bifolio.input_files import LARGE_BYTES, read_object, visible
from bifolio.kernels.cache_scales import CacheScales
from bifolio.lab.compress.coded import Stored
from bifolio.lab.compress.output_files import TensorFile, write_json
from bifolio.lab.compress.quantization_config import cache_scheme
from bifolio.lab.compress.source_model import SourceModel

SCALES_FILE = "model-kv-scales.safetensors"


def write_scales(source: SourceModel, scales: CacheScales) -> None:
    """Write scales into the folder of `source`; those of an earlier run are replaced.

    CheckpointError if there are scales in files that are not ours.
    """
    folder = source.path
    origin = source.identity
    index = _index(source)
    weight_map: dict[str, str] = index["weight_map"]
    for name in source.scale_names:
        if weight_map[name] != SCALES_FILE:
            raise CheckpointError(
                f"{weight_map[name]} already holds {name}; take a checkpoint without such scales"
            )
        del weight_map[name]
    both_lh = torch.cat((scales.k_lh, scales.v_lh))
    by_head = bool((both_lh != both_lh[:, :1]).any())
    tensors = _tensors(source.prefix, scales, by_head)
    stored = [Stored(name, "F32", tuple(tensor.shape)) for name, tensor in tensors.items()]
    with TensorFile(folder / SCALES_FILE, stored) as file:
        for name, tensor in tensors.items():
            file.put(name, tensor)
        file.commit()
    weight_map |= dict.fromkeys(tensors, SCALES_FILE)
    index["metadata"] = {"total_size": _size(folder, weight_map)}
    write_json(folder / INDEX, index)
    described = {ORIGIN: origin} | _described(source.config, by_head)
    write_json(folder / "config.json", described)


def _tensors(prefix: str, scales: CacheScales, by_head: bool) -> dict[str, Tensor]:
    found = {}
    for which, scale_lh in (("k", scales.k_lh), ("v", scales.v_lh)):
        for layer, scale_h in enumerate(scale_lh):
            name = f"{prefix}model.layers.{layer}.self_attn.{which}_scale"
            held = scale_h.view(-1, 1, 1) if by_head else scale_h[:1]
            found[name] = held.to(torch.float32).contiguous()
    return found


def _index(source: SourceModel) -> dict[str, Any]:
    found = read_object(source.path / INDEX, LARGE_BYTES)
    if found is not None:
        return found
    only = visible(source.path, "*.safetensors")[0].name
    return {"weight_map": dict.fromkeys(source.nbytes, only)}


def _size(folder: Path, weight_map: dict[str, str]) -> int:
    """Bytes of all tensors: those of the files without their headers."""
    total = 0
    for name in set(weight_map.values()):
        with (folder / name).open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
        total += (folder / name).stat().st_size - header - 8
    return total


def _described(config: dict[str, Any], by_head: bool) -> dict[str, Any]:
    inner = config.get("text_config") or {}
    nested = "quantization_config" in inner and "quantization_config" not in config
    place = inner if nested else config
    quantization = place.get("quantization_config") or {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
    }
    if quantization.get("quant_method") == "compressed-tensors":
        quantization = quantization | {"kv_cache_scheme": cache_scheme(by_head)}
    changed = place | {"quantization_config": quantization}
    return config | {"text_config": changed} if nested else changed
