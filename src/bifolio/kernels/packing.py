"""How the native kernels pack a weight matrix; without tensors, so that a planner can ask."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from bifolio.errors import UnsupportedError
from bifolio.formats import FP8_BLOCK, Number, Scaling, WeightFormat

if TYPE_CHECKING:
    from bifolio import _native


@dataclass(frozen=True, slots=True)
class Packing:
    """What has to be known of packed bytes to multiply with them."""

    format: WeightFormat
    n: int
    k: int
    scales: str
    """Their type: none, fp16, bf16, fp32 or block."""
    zeros: bool
    """Whether offsets are zero points."""
    gated: bool
    """Whether rows are gates, then as many ups."""

    @classmethod
    def of(
        cls, fmt: WeightFormat, n: int, k: int, scales: str, *, zeros: bool, gated: bool
    ) -> Packing:
        """`scales` is the type that those of an integer format have: fp16, bf16 or fp32."""
        match fmt.scaling:
            case Scaling.NONE:
                scales = "none"
            case Scaling.BLOCK if not gated:
                scales = "block"
            case _ if fmt.number is Number.FP8:
                scales = "fp32"
            case _:
                pass
        return cls(fmt, n, k, scales, zeros, gated)

    def layout(self) -> _native.WeightLayout:
        """Where each byte goes; `packed_bytes` is their number."""
        fmt = self.format
        layout: _native.WeightLayout = load_native().WeightLayout(
            n=self.n,
            k=self.k,
            group=FP8_BLOCK if fmt.scaling is Scaling.BLOCK else fmt.group,
            codes=str(fmt.number),
            scales=self.scales,
            offsets=fmt.zero_points,
            zeros=self.zeros,
            int8_activations=fmt.int8_activations,
            gated=self.gated,
        )
        return layout


def load_native() -> ModuleType:
    """The compiled module; UnsupportedError where it is not built."""
    try:
        from bifolio import _native
    except ImportError as error:
        raise UnsupportedError(
            f"the native kernels are not built ({error}); install the package, build it as "
            "CMakeLists.txt says, or choose kernels=reference"
        ) from error
    return _native
