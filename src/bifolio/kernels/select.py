"""Picks the kernel set, once, when an engine is built."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bifolio.kernels.native import NativeOps, available
from bifolio.kernels.ops import Ops
from bifolio.kernels.reference import ReferenceOps
from bifolio.kernels.reference_pages import PagesKernels, ReferencePages
from bifolio.kernels.reference_sampling import ReferenceSampling, SamplingOps
from bifolio.machine import default_threads
from bifolio.wording import plural


@dataclass(frozen=True, slots=True)
class KernelSet:
    """What an engine computes with. `recorder` is the set itself where it can record passes."""

    ops: Ops
    sampling: SamplingOps
    pages: PagesKernels
    recorder: NativeOps | None

    def __str__(self) -> str:
        if self.recorder is None:
            return self.ops.name
        return f"{self.ops.name} {self.recorder.isa}, {plural(self.recorder.threads, 'thread')}"


def select_kernels(name: str, threads: int = 0) -> KernelSet:
    """`native`, `reference`, or `auto`: native where it is built.

    `threads` 0 takes as many as can compute at once (`machine.default_threads`). Torch, which
    packs weights and is the reference, counts cores and no quota, so it is held to that number too.
    """
    torch.set_num_threads(min(torch.get_num_threads(), default_threads()))
    if name == "reference" or (name == "auto" and not available()):
        return KernelSet(ReferenceOps(), ReferenceSampling(), ReferencePages(), None)
    native = NativeOps(threads)
    return KernelSet(native, native, native, native)
