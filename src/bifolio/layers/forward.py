"""What the layers of one forward pass have in common."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bifolio.kernels.ops import Batch


@dataclass(slots=True)
class ForwardPass:
    """One pass over the layers, made by the decoder and gone with it."""

    batch: Batch
    cos_sin_pd: Tensor
    """Rotations, as `Ops.rope_store` takes them."""
    chosen_tk: Tensor | None = None
    """Positions that sparse attention sees, int64 [t, k]: filled by each layer that owns an index,
    read by it and the layers after it that own none."""
    wanted: Batch | None = None
    """`batch.wanted()`, set for the last layer: what comes of other tokens there is not needed."""
