"""How a checkpoint stores its quantized matrices: the `quantization_config` of its `config.json`.

Read by the loader, the planner and the compressor, so that what one accepts the others do too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from bifolio.errors import UnsupportedError
from bifolio.formats import FP8_BLOCK, Number, Scaling, WeightFormat
from bifolio.spec.fields import Fields

_BLOCK = [FP8_BLOCK, FP8_BLOCK]
_INT4_GROUPS = (32, 64, 128)
_INT8_GROUPS = (32,)
_WHOLE_ROWS = -1
_GPTQ_VERSIONS = {"gptq": 1, "gptq_v2": 2}


class TensorLayout(StrEnum):
    """Which tensors make one quantized matrix (`checkpoint.layouts` reads each)."""

    BYTES = "bytes"
    """One byte per code, rows along the inputs, scales beside them: fp8 and int8."""
    PACKED = "packed"
    """`pack-quantized` of compressed-tensors: eight int4 codes per 32-bit word."""
    GPTQ = "gptq"
    AWQ = "awq"


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """How the quantized matrices of a checkpoint are stored.

    `format` holds their numbers exactly; `scaling` is which numbers share a stored scale, which
    `format` may repeat (one scale per tensor of int8 becomes one per channel). `scales` is the
    suffix of the scales and `dtype` the safetensors type of the codes of the layout BYTES.
    `ignored` are module names, or `re:` patterns, that are not quantized.
    """

    layout: TensorLayout
    format: WeightFormat
    scaling: Scaling
    scales: str = "weight_scale"
    dtype: str = "I32"
    whole_rows: bool = False
    """GPTQ, AWQ: one group spans all inputs, and `format` splits it."""
    version: int = 1
    """GPTQ: 1 stores zero points minus one."""
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """How a checkpoint stores one matrix; enough to tell the bytes that it takes in memory."""

    format: WeightFormat
    scales: str = "fp16"
    """Type of the scales of an integer format: fp16, bf16 or fp32."""
    reordered: bool = False
    """Whether columns stand in another order than the inputs (int32 [k] beside the codes)."""


def read_quantization(config: Mapping[str, Any]) -> StoredQuantization | None:
    """What a `config.json` declares; None where nothing is quantized.

    UnsupportedError names a method or a scheme that cannot be read.
    """
    readers = {
        "fp8": _block_fp8,
        "compressed-tensors": _compressed,
        "gptq": _gptq,
        "awq": _awq,
    }
    fields = Fields(config, "config.json")
    for values in (fields, fields.part("text_config")):
        part = values.part("quantization_config")
        if not part.keys():
            continue
        method = part.text("quant_method")
        if method in readers:
            return readers[method](part)
        raise UnsupportedError(
            f"config.json: quantization_config: quant_method={method!r} is not supported; "
            f"methods: {', '.join(readers)}; or use a checkpoint in bf16"
        )
    return None


def _block_fp8(part: Fields) -> StoredQuantization:
    part.refuse_unless("fmt", ("e4m3", "float8_e4m3fn"), "fp8 is e4m3")
    part.refuse_unless("activation_scheme", ("dynamic",), "activations have no static scales")
    part.refuse_unless("weight_block_size", (_BLOCK,), "blocks are 128 × 128")
    if "weight_block_size" not in part:
        raise UnsupportedError(
            "config.json: quantization_config: fp8 without weight_block_size is not supported"
        )
    return StoredQuantization(
        TensorLayout.BYTES,
        WeightFormat(Number.FP8, Scaling.BLOCK),
        Scaling.BLOCK,
        "weight_scale_inv",
        "F8_E4M3",
        ignored=_ignored(part),
    )


def _check_cache(scheme: Fields) -> None:
    """Static scales of an fp8 cache are read (`stored_cache_scales`); other schemes are refused."""
    if not scheme.keys():
        return
    what = (scheme.text("type", "int"), scheme.integer("num_bits", 8))
    if what != ("float", 8):
        raise UnsupportedError(
            f"config.json: quantization_config: kv_cache_scheme of {what[0]}{what[1]} is not "
            "supported; the scales of an fp8 cache are"
        )
    scheme.refuse_unless("symmetric", (True,), "the cache has no zero points")
    scheme.refuse_unless("dynamic", (False,), "scales are static")
    scheme.refuse_unless("strategy", ("tensor", "attn_head"), "one scale by layer or head")


def _compressed(part: Fields) -> StoredQuantization | None:
    _check_cache(part.part("kv_cache_scheme"))
    sparsity = part.part("sparsity_config")
    sparsity.refuse_unless("format", ("dense",), "sparse weights are not read")
    groups = part.part("config_groups")
    if not groups.keys() and "kv_cache_scheme" in part:
        return None
    if len(groups.keys()) != 1:
        raise UnsupportedError(
            "config.json: quantization_config: config_groups must hold one group of weights, not "
            f"{sorted(groups.keys())}"
        )
    group = groups.part(next(iter(groups.keys())))
    weights, form = group.part("weights"), part.text("format")
    kind, bits = weights.text("type", "int"), weights.integer("num_bits")
    weights.refuse_unless("dynamic", (False,), "weights have static scales")
    known = {
        ("pack-quantized", "int", 4): (Number.INT4, "I32"),
        ("naive-quantized", "int", 8): (Number.INT8, "I8"),
        ("int-quantized", "int", 8): (Number.INT8, "I8"),
        ("naive-quantized", "float", 8): (Number.FP8, "F8_E4M3"),
        ("float-quantized", "float", 8): (Number.FP8, "F8_E4M3"),
    }
    if (form, kind, bits) not in known:
        raise UnsupportedError(
            f"config.json: quantization_config: format={form!r} with {kind} of {bits} bits is not "
            f"supported; formats: {', '.join(f'{f} {k}{b}' for f, k, b in known)}"
        )
    number, dtype = known[form, kind, bits]
    zeros = not weights.flag("symmetric", True)
    scaling, fmt = _scaling(weights, number, zeros)
    if number is Number.INT4:
        return StoredQuantization(TensorLayout.PACKED, fmt, scaling, ignored=_ignored(part))
    weights.refuse_unless("symmetric", (True,), f"zero points of {number} are not read")
    weights.refuse_unless("actorder", ("static", "weight", False), "columns stay in order")
    return StoredQuantization(TensorLayout.BYTES, fmt, scaling, dtype=dtype, ignored=_ignored(part))


def _scaling(weights: Fields, number: Number, zeros: bool) -> tuple[Scaling, WeightFormat]:
    """Scaling as stored, and the format that holds it."""
    strategy = weights.text("strategy", "tensor")
    if strategy == "group":
        size = weights.integer("group_size")
        if size in {Number.INT4: _INT4_GROUPS, Number.INT8: _INT8_GROUPS}.get(number, ()):
            return Scaling.GROUP, WeightFormat(number, Scaling.GROUP, size, zeros)
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
        return scaling, WeightFormat(number, Scaling.GROUP, _INT4_GROUPS[-1], zeros)
    return scaling, WeightFormat(number, scaling if number is Number.FP8 else Scaling.CHANNEL)


def _gptq(part: Fields) -> StoredQuantization:
    part.refuse_unless("bits", (4,), "GPTQ is read with 4 bits")
    part.refuse_unless("pack_dtype", ("int32",), "codes lie in words of 32 bits")
    part.refuse_unless("dynamic", ({},), "all matrices are quantised alike")
    version = part.text("checkpoint_format", "gptq")
    if version not in _GPTQ_VERSIONS:
        raise UnsupportedError(
            f"config.json: quantization_config: checkpoint_format={version!r} is not supported; "
            f"formats: {', '.join(_GPTQ_VERSIONS)}"
        )
    fmt, whole_rows = _int4_groups(part, zeros="sym" not in part or not part.flag("sym"))
    return StoredQuantization(
        TensorLayout.GPTQ,
        fmt,
        Scaling.GROUP,
        whole_rows=whole_rows,
        version=_GPTQ_VERSIONS[version],
        ignored=_ignored(part),
    )


def _awq(part: Fields) -> StoredQuantization:
    part.refuse_unless("bits", (4,), "AWQ is read with 4 bits")
    part.refuse_unless("w_bit", (4,), "AWQ is read with 4 bits")
    part.refuse_unless("zero_point", (True,), "AWQ without zero points is not read")
    version = part.text("version", "gemm")
    if version.lower() != "gemm":
        raise UnsupportedError(
            f"config.json: quantization_config: version={version!r} of AWQ is not supported; "
            "version gemm is"
        )
    fmt, whole_rows = _int4_groups(part, zeros=True)
    return StoredQuantization(
        TensorLayout.AWQ, fmt, Scaling.GROUP, whole_rows=whole_rows, ignored=_ignored(part)
    )


def _int4_groups(part: Fields, *, zeros: bool) -> tuple[WeightFormat, bool]:
    """The format by `group_size`, and whether one group spans whole rows."""
    size = part.integer("group_size", low=_WHOLE_ROWS)
    if size == _WHOLE_ROWS:
        return WeightFormat(Number.INT4, Scaling.GROUP, _INT4_GROUPS[-1], zeros), True
    if size not in _INT4_GROUPS:
        raise UnsupportedError(
            f"config.json: quantization_config: group_size={size} is not supported; sizes: -1, "
            f"{', '.join(map(str, _INT4_GROUPS))}"
        )
    return WeightFormat(Number.INT4, Scaling.GROUP, size, zeros), False


def _ignored(part: Fields) -> tuple[str, ...]:
    """Modules left as floats; GPTQ and AWQ leave out the head without saying so."""
    for key in ("ignore", "modules_to_not_convert"):
        if key in part:
            return tuple(part.texts(key))
    return ()
