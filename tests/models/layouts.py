"""Writers of the layouts in which checkpoints store quantised matrices and experts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bifolio.formats import WeightFormat
from bifolio.quant import decode, encode

Written = dict[str, Tensor]
Layout = tuple[dict[str, Any], Callable[[str, Tensor], tuple[Written, Tensor]]]
"""A `quantization_config`, and what it makes of a matrix: its tensors, and what they mean."""


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False} | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


def _packed(group: int) -> Layout:
    """Codes -8 … 7 stored plus 8, number 8j + i of a row in bits 4i of word j."""

    def write(part: str, matrix: Tensor) -> tuple[Written, Tensor]:
        n, k = matrix.shape
        size = group or k
        padded = torch.nn.functional.pad(matrix, (0, -k % size)).view(n, -1, size)
        scales = (padded.abs().amax(dim=-1) / 7).to(torch.bfloat16)
        codes = (padded / scales.float()[..., None]).round().clamp(-8, 7)
        means = (codes * scales.float()[..., None]).view(n, -1)[:, :k]
        words = torch.nn.functional.pad(codes.view(n, -1)[:, :k].long() + 8, (0, -k % 8))
        packed = (words.view(n, -1, 8) << (4 * torch.arange(8))).sum(dim=-1)
        packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
        return {
            f"{part}.weight_packed": packed,
            f"{part}.weight_scale": scales,
            f"{part}.weight_shape": torch.tensor([n, k]),
        }, means

    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return _compressed("pack-quantized", num_bits=4, type="int", **strategy), write


def _encoded(config: dict[str, Any], fmt: str, scales: str) -> Layout:
    def write(part: str, matrix: Tensor) -> tuple[Written, Tensor]:
        coded = encode(matrix, WeightFormat.parse(fmt))
        assert coded.scales is not None
        stored = coded.scales
        if fmt in ("int8", "fp8:channel"):
            stored = stored.view(-1, 1)
        return {f"{part}.weight": coded.codes, f"{part}.{scales}": stored}, decode(coded)

    return config, write


def _one_scale(part: str, matrix: Tensor) -> tuple[Written, Tensor]:
    scale = (matrix.abs().max() / 127).to(torch.bfloat16).view(1)
    codes = (matrix / scale.float()).round().to(torch.int8)
    return {f"{part}.weight": codes, f"{part}.weight_scale": scale}, codes * scale.float()


BLOCK_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
LAYOUTS: dict[str, Layout] = {
    "fp8 in blocks": _encoded(BLOCK_FP8, "fp8", "weight_scale_inv"),
    "int4 in groups of 32": _packed(32),
    "int4 in groups of 128": _packed(128),
    "int4 by channel": _packed(0),
    "int8 by channel": _encoded(
        _compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
        "int8",
        "weight_scale",
    ),
    "int8 by tensor": (
        _compressed("naive-quantized", num_bits=8, type="int", strategy="tensor"),
        _one_scale,
    ),
    "fp8 by channel": _encoded(
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        "fp8:channel",
        "weight_scale",
    ),
    "fp8 by tensor": _encoded(
        _compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
        "fp8:tensor",
        "weight_scale",
    ),
}


def quantised(weights: Written, layout: str, which: str) -> tuple[Written, Written]:
    """All matrices whose name matches `which` in a layout, and as floats of the same meaning."""
    _, write = LAYOUTS[layout]
    stored: Written = {}
    means: Written = {}
    for name, tensor in weights.items():
        if not re.search(which, name) or tensor.dim() != 2:
            stored[name] = means[name] = tensor
            continue
        written, means[name] = write(name.removesuffix(".weight"), tensor)
        stored |= written
        means[name] = means[name].float().contiguous()
    return {name: tensor.contiguous() for name, tensor in stored.items()}, means


def fused(weights: Written, *, transposed: bool) -> Written:
    """All experts of a layer in `gate_up_proj` and `down_proj` of three dimensions."""
    found: dict[tuple[str, str], dict[int, Tensor]] = {}
    others: Written = {}
    for name, tensor in weights.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.weight", name)
        if match:
            found.setdefault((match[1], match[3]), {})[int(match[2])] = tensor
        else:
            others[name] = tensor
    stacked = {key: torch.stack([e[i] for i in range(len(e))]) for key, e in found.items()}
    for at in {at for at, _ in stacked}:
        gate_up = torch.cat((stacked[at, "gate"], stacked[at, "up"]), dim=1)
        for part, tensor in (("gate_up", gate_up), ("down", stacked[at, "down"])):
            others[f"{at}.{part}_proj"] = (
                tensor.transpose(1, 2) if transposed else tensor
            ).contiguous()
    return others
