"""Writers of the layouts in which checkpoints store quantised matrices and experts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bifolio.formats import WeightFormat
from bifolio.quant import dequantize, encode
from support.packers import Coded, awq, code, gptq, packed

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


def _coded(config: dict[str, Any], pack: Callable[[Coded], Written], **options: Any) -> Layout:
    def write(part: str, matrix: Tensor) -> tuple[Written, Tensor]:
        coded = code(matrix, **options)
        tensors = {f"{part}.{suffix}": tensor for suffix, tensor in pack(coded).items()}
        return tensors, coded.means

    return config, write


def _packed(group: int, *, zeros: bool = False, **weights: Any) -> Layout:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    one_for_all = weights.get("strategy") == "tensor"
    parts = {"num_bits": 4, "type": "int", "symmetric": not zeros} | strategy | weights
    return _coded(
        _compressed("pack-quantized", **parts),
        lambda coded: packed(coded, zeros=zeros, one_for_all=one_for_all),
        group=group,
        symmetric=not zeros,
        shuffled=weights.get("actorder") == "group",
        one_for_all=one_for_all,
        dtype=torch.bfloat16,
    )


def _encoded(
    config: dict[str, Any], fmt: str, scales: str, dtype: torch.dtype | None = None
) -> Layout:
    def write(part: str, matrix: Tensor) -> tuple[Written, Tensor]:
        coded = encode(matrix, WeightFormat.parse(fmt))
        assert coded.scales is not None
        if dtype is not None:  # numbers that no half holds
            coded = replace(coded, scales=coded.scales.to(dtype) * 1.0001)
        assert coded.scales is not None
        stored = coded.scales
        if fmt in ("int8", "fp8:channel"):
            stored = stored.view(-1, 1)
        return {f"{part}.weight": coded.codes, f"{part}.{scales}": stored}, dequantize(coded)

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
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
LAYOUTS: dict[str, Layout] = {
    "fp8 in blocks": _encoded(BLOCK_FP8, "fp8", "weight_scale_inv"),
    "int4 in groups of 32": _packed(32),
    "int4 in groups of 128": _packed(128),
    "int4 by channel": _packed(0),
    "int4 by tensor": _packed(0, strategy="tensor"),
    "int4 with zero points": _packed(32, zeros=True),
    "int4 with zero points in groups of 64": _packed(64, zeros=True),
    "int4 with zero points by channel": _packed(0, zeros=True),
    "int4 in order of activations": _packed(32, zeros=True, actorder="group"),
    "GPTQ": _coded(GPTQ, lambda coded: gptq(coded, 1), group=32),
    "GPTQ version 2": _coded(
        GPTQ | {"checkpoint_format": "gptq_v2"}, lambda coded: gptq(coded, 2), group=32
    ),
    "GPTQ symmetric, in order of activations": _coded(
        GPTQ | {"desc_act": True, "sym": True},
        lambda coded: gptq(coded, 1),
        group=32,
        symmetric=True,
        shuffled=True,
    ),
    "AWQ": _coded(AWQ, awq, group=32),
    "int8 by channel": _encoded(
        _compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
        "int8",
        "weight_scale",
    ),
    "int8 by channel, scales in fp32": _encoded(
        _compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
        "int8",
        "weight_scale",
        torch.float32,
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


def fused(weights: Written, *, transposed: bool, joint: str = ".") -> Written:
    """All experts of a layer in `gate_up_proj` and `down_proj` of three dimensions.

    Codes and scales too, their names behind the parameter's by `joint`: `gate_up_proj.weight_scale`
    or `gate_up_proj_scale`.
    """
    found: dict[tuple[str, str, str], dict[int, Tensor]] = {}
    others: Written = {}
    for name, tensor in weights.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.(\w+)", name)
        if match:
            found.setdefault((match[1], match[3], match[4]), {})[int(match[2])] = tensor
        else:
            others[name] = tensor
    stacked = {key: torch.stack([e[i] for i in range(len(e))]) for key, e in found.items()}
    for (at, part, suffix), one in stacked.items():
        if part == "up":
            continue
        tensor = one
        if part == "gate":
            up = stacked[at, "up", suffix]
            if suffix == "weight_shape":
                tensor = torch.stack((tensor[:, 0] + up[:, 0], up[:, 1]), dim=1)
            else:
                tensor = torch.cat((tensor, up), dim=1)
        if suffix == "weight_shape":
            sizes = [len(tensor), *tensor[0].tolist()]
            tensor = torch.tensor([sizes[0], sizes[2], sizes[1]] if transposed else sizes)
        elif transposed:
            tensor = tensor.transpose(1, 2)
        whole = f"{at}.{'gate_up' if part == 'gate' else part}_proj"
        short = suffix if joint == "." else suffix.removeprefix("weight_")
        named = whole if suffix == "weight" else f"{whole}{joint}{short}"
        others[named] = tensor.contiguous()
    return others


def by_projection(weights: Written) -> Written:
    """Experts as `experts.gate_proj.3` where others say `experts.3.gate_proj`."""
    swapped = r"\1.experts.\3.\2."
    return {
        re.sub(r"(.*)\.experts\.(\d+)\.(\w+_proj)\.", swapped, name): tensor
        for name, tensor in weights.items()
    }
