"""Packs and unpacks number formats: tensors in, tensors out."""

from bifolio.quant.dequantize import dequantize, unpack_int4
from bifolio.quant.encoding import encode, pack_int4

__all__ = ["dequantize", "encode", "pack_int4", "unpack_int4"]
