"""How checkpoints lay out quantized matrices: one module per layout."""

from bifolio.checkpoint.layouts.compressed_tensors import ByteLayout, PackedLayout
from bifolio.checkpoint.layouts.gptq_awq import AWQLayout, GPTQLayout
from bifolio.checkpoint.layouts.layout import Layout
from bifolio.spec.quantization import StoredQuantization, TensorLayout


def layout_of(stored: StoredQuantization) -> Layout:
    """The reader of matrices that are stored so."""
    match stored.layout:
        case TensorLayout.BYTES:
            return ByteLayout(stored.format, stored.scaling, stored.scales, stored.dtype)
        case TensorLayout.PACKED:
            return PackedLayout(stored.format, stored.scaling)
        case TensorLayout.GPTQ:
            return GPTQLayout(stored.format, stored.whole_rows, stored.version)
        case TensorLayout.AWQ:
            return AWQLayout(stored.format, stored.whole_rows)
