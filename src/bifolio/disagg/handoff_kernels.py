"""The kernels of a hand-off out of those of an engine."""

from __future__ import annotations

from bifolio.disagg.pool_source import HandOffKernels
from bifolio.kernels.reference_convert import ReferenceConvert
from bifolio.kernels.reference_pages import ReferencePages
from bifolio.kernels.select import KernelSet


class ReferenceHandOff(ReferencePages, ReferenceConvert):
    """The readable twins."""


def hand_off_kernels(kernels: KernelSet) -> HandOffKernels:
    """Native ones where the engine has them; both yield the same bytes."""
    return kernels.recorder if kernels.recorder is not None else ReferenceHandOff()
