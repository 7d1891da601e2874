"""Packs and unpacks number formats: tensors in, tensors out."""

from bifolio.kernels.decode import decode, unpack_int4
from bifolio.quant.encoding import encode, pack_int4

__all__ = ["decode", "encode", "pack_int4", "unpack_int4"]
