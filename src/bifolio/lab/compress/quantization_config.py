"""The `quantization_config` by which other engines find out what is in codes, and how."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from bifolio.formats import FP8_BLOCK, Number, Scaling, WeightFormat
from bifolio.lab.compress.shard_layout import CACHE_SCALES, OTHER, OutputTensor
from bifolio.spec.weights import Kind

_FORMS = {
    Number.INT4: "pack-quantized",
    Number.INT8: "naive-quantized",
    Number.FP8: "float-quantized",
}
_IN_LAYER = re.compile(r"model\.layers\.\d+\.(.+)")


def compressed_config(
    config: Mapping[str, Any], fmt: WeightFormat, pieces: Iterable[OutputTensor], prefix: str
) -> dict[str, Any]:
    """A model's `config.json` with the description of the compressed matrices in it.

    It stands at the top, also where the language model's own part is under `text_config`. Static
    scales of the cache among the pieces are described too.
    """
    pieces = list(pieces)
    scales = [piece for piece in pieces if piece.kind == CACHE_SCALES]
    described = {key: value for key, value in config.items() if key != "quantization_config"}
    if isinstance(text := config.get("text_config"), Mapping):
        kept = {key: value for key, value in text.items() if key != "quantization_config"}
        described["text_config"] = kept
    form = _FORMS[fmt.number]
    group = {
        "targets": ["Linear"],
        "weights": _weights(fmt),
        "input_activations": None,
        "output_activations": None,
        "format": form,
    }
    described["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored(pieces, prefix),
        "kv_cache_scheme": cache_scheme(_by_head(scales)) if scales else None,
        "global_compression_ratio": None,
    }
    return described


def cache_scheme(by_head: bool) -> dict[str, Any]:
    """How static scales of an fp8 cache are described: by KV head, or by layer."""
    return {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "dynamic": False,
        "strategy": "attn_head" if by_head else "tensor",
    }


def _by_head(scales: Iterable[OutputTensor]) -> bool:
    return any(prod(piece.shape) > 1 for piece in scales)


def ignored(pieces: Iterable[OutputTensor], prefix: str) -> list[str]:
    """Names of the matrices that are not in codes, as patterns where all layers agree."""
    by_tail: dict[str, dict[str, bool]] = {}
    found: dict[str, None] = {}
    for piece in pieces:
        if piece.kind == OTHER:
            found[f"re:{re.escape(piece.name.partition('.')[0])}\\..*"] = None
        elif len(piece.shape) == 2 and piece.kind != Kind.EMBEDDING:
            in_layer = _IN_LAYER.match(piece.part)
            tail = re.sub(r"\d+", r"\\d+", re.escape(in_layer[1])) if in_layer else piece.part
            by_tail.setdefault(tail, {})[piece.part] = piece.coded
    for tail, modules in by_tail.items():
        kept = [name for name, coded in modules.items() if not coded]
        if tail in modules or len(kept) < len(modules):
            found |= dict.fromkeys(prefix + name for name in kept)
        else:
            found[f"re:.*\\.{tail}$"] = None
    return list(found)


def _weights(fmt: WeightFormat) -> dict[str, Any]:
    return {
        "num_bits": fmt.number.bits,
        "type": "float" if fmt.number is Number.FP8 else "int",
        "symmetric": not fmt.zero_points,
        "strategy": str(fmt.scaling),
        "group_size": fmt.group or None,
        "block_structure": [FP8_BLOCK] * 2 if fmt.scaling is Scaling.BLOCK else None,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
