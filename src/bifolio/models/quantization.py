"""How a checkpoint stores its quantised matrices: `quantization_config`, read by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bifolio.errors import UnsupportedError
from bifolio.formats import FP8_BLOCK, Number, Scaling, WeightFormat
from bifolio.spec.fields import Fields

_BLOCK = [FP8_BLOCK, FP8_BLOCK]
_INT4_GROUPS = (32, 64, 128)
_INT8_GROUPS = (32,)


@dataclass(frozen=True, slots=True)
class Quantization:
    """Names of the tensors of a quantised matrix, and what they mean.

    `scaling` is as stored; `format` may spread one scale over several groups or channels, which
    changes no number.
    """

    format: WeightFormat
    scaling: Scaling
    codes: str
    """Suffix of the codes' name."""
    scales: str
    dtype: str
    """Stored type of the codes."""

    @property
    def number(self) -> Number:
        return self.format.number


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """The form that a `config.json` declares; None where it declares none.

    UnsupportedError names a form that cannot be read.
    """
    for values in (config, config.get("text_config") or {}):
        part = Fields(values, "config.json").part("quantization_config")
        if not part.keys():
            continue
        method = part.text("quant_method")
        if method == "fp8":
            return _block_fp8(part)
        if method == "compressed-tensors":
            return _compressed(part)
        raise UnsupportedError(
            f"config.json: quantization_config: quant_method={method!r} is not supported; "
            "methods: fp8 in blocks, compressed-tensors; or use a checkpoint in bf16"
        )
    return None


def _block_fp8(part: Fields) -> Quantization:
    part.refuse_unless("fmt", ("e4m3", "float8_e4m3fn"), "fp8 is e4m3")
    part.refuse_unless("activation_scheme", ("dynamic",), "activations have no static scales")
    part.refuse_unless("weight_block_size", (_BLOCK,), "blocks are 128 × 128")
    if "weight_block_size" not in part:
        raise UnsupportedError(
            "config.json: quantization_config: fp8 without weight_block_size is not supported"
        )
    fmt = WeightFormat(Number.FP8, Scaling.BLOCK)
    return Quantization(fmt, Scaling.BLOCK, "weight", "weight_scale_inv", "F8_E4M3")


def _compressed(part: Fields) -> Quantization:
    part.refuse_unless("kv_cache_scheme", (), "scales of the cache are not read")
    sparsity = part.part("sparsity_config")
    sparsity.refuse_unless("format", ("dense",), "sparse weights are not read")
    groups = part.part("config_groups")
    if len(groups.keys()) != 1:
        raise UnsupportedError(
            "config.json: quantization_config: config_groups must hold one group of weights, not "
            f"{sorted(groups.keys())}"
        )
    group = groups.part(next(iter(groups.keys())))
    weights, form = group.part("weights"), part.text("format")
    kind, bits = weights.text("type", "int"), weights.integer("num_bits")
    weights.refuse_unless("symmetric", (True,), "zero points are not read")
    weights.refuse_unless("dynamic", (False,), "weights have static scales")
    weights.refuse_unless("actorder", ("static", "weight", False), "columns stay in order")
    known = {
        ("pack-quantized", "int", 4): (Number.INT4, "weight_packed", "I32"),
        ("naive-quantized", "int", 8): (Number.INT8, "weight", "I8"),
        ("int-quantized", "int", 8): (Number.INT8, "weight", "I8"),
        ("naive-quantized", "float", 8): (Number.FP8, "weight", "F8_E4M3"),
        ("float-quantized", "float", 8): (Number.FP8, "weight", "F8_E4M3"),
    }
    if (form, kind, bits) not in known:
        raise UnsupportedError(
            f"config.json: quantization_config: format={form!r} with {kind} of {bits} bits is not "
            f"supported; formats: {', '.join(f'{f} {k}{b}' for f, k, b in known)}"
        )
    number, codes, dtype = known[form, kind, bits]
    scaling, fmt = _scaling(weights, number)
    return Quantization(fmt, scaling, codes, "weight_scale", dtype)


def _scaling(weights: Fields, number: Number) -> tuple[Scaling, WeightFormat]:
    """Scaling as stored, and the format that holds it."""
    strategy = weights.text("strategy", "tensor")
    if strategy == "group":
        size = weights.integer("group_size")
        if size in {Number.INT4: _INT4_GROUPS, Number.INT8: _INT8_GROUPS}.get(number, ()):
            return Scaling.GROUP, WeightFormat(number, Scaling.GROUP, size)
        raise UnsupportedError(
            f"config.json: quantization_config: group_size={size} of {number} is not supported"
        )
    if strategy == "block" and number is Number.FP8:
        weights.refuse_unless("block_structure", (_BLOCK,), "blocks are 128 × 128")
        return Scaling.BLOCK, WeightFormat(number, Scaling.BLOCK)
    if strategy not in ("channel", "tensor"):
        raise UnsupportedError(
            f"config.json: quantization_config: strategy={strategy!r} of {number} is not supported"
        )
    scaling = Scaling(strategy)
    if number is Number.INT4:
        return scaling, WeightFormat(number, Scaling.GROUP, _INT4_GROUPS[-1])
    return scaling, WeightFormat(number, scaling if number is Number.FP8 else Scaling.CHANNEL)
