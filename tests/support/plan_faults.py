"""Broken plans on demand: kernels that do to weights or cache what a real mistake would do.

For tests of evaluation: a plan with such a fault must be told from the sound one.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

import torch
from torch import Tensor

from bifolio.engine.engine import Engine
from bifolio.formats import Number
from bifolio.kernels.native import NativeOps
from bifolio.kernels.native_linear import NativeWeight
from bifolio.kernels.ops import Batch, LayerCache
from bifolio.kernels.select import KernelSet
from bifolio.lab.eval.subject import Setup, Subject, SubjectTokenizer
from bifolio.lab.eval.task_run import BuildSubject
from bifolio.quant.quant_tensor import QuantTensor

SCALE_ERROR = 4.0


class PlanFault(StrEnum):
    """What is wrong."""

    CACHE_SCALE = "cache scale"
    """An fp8 cache with static scales is read at four times the scale that it was written at."""
    SWAPPED_NIBBLES = "swapped nibbles"
    """The two codes of each byte of an int4 weight have changed places."""
    ZEROED_LAYER = "zeroed layer"
    """The cache of one layer in the middle holds zeros."""


class _FaultyOps(NativeOps):
    """Native kernels with one fault."""

    def __init__(self, fault: PlanFault, threads: int, layer: int) -> None:
        super().__init__(threads)
        self._fault = fault
        self._layer = layer

    def prepare(self, weight: QuantTensor, bias_n: Tensor | None = None) -> NativeWeight:
        if self._fault is PlanFault.SWAPPED_NIBBLES and weight.format.number is Number.INT4:
            codes = weight.codes
            weight = replace(weight, codes=(codes >> 4) | (codes << 4))
        return super().prepare(weight, bias_n)

    def attention(
        self,
        q_thd: Tensor,
        batch: Batch,
        cache: LayerCache,
        heads: int,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        return super().attention(q_thd, batch, self._spoiled(cache), heads, scale, window)

    def latent_attention(
        self,
        q_thr: Tensor,
        batch: Batch,
        cache: LayerCache,
        scale: float,
        chosen_tk: Tensor | None = None,
    ) -> Tensor:
        return super().latent_attention(q_thr, batch, self._spoiled(cache), scale, chosen_tk)

    def _spoiled(self, cache: LayerCache) -> LayerCache:
        """The cache that attention is given in place of this one."""
        if self._fault is PlanFault.CACHE_SCALE:
            assert cache.spec.cache.static_scales, "this fault needs a cache in fp8"
            unit = torch.ones(1 if cache.spec.latent is not None else cache.spec.kv_heads)
            k_scales, v_scales = (
                SCALE_ERROR * (unit if held is None else held)
                for held in (cache.k_scales, cache.v_scales)
            )
            return replace(cache, k_scales=k_scales, v_scales=v_scales)
        if self._fault is PlanFault.ZEROED_LAYER and cache.layer == self._layer:
            start = cache.spec.layer_offset(cache.layer)
            cache.pool[:, start : start + cache.spec.layer_bytes] = 0
        return cache


def faulty(fault: PlanFault) -> BuildSubject:
    """Builds subjects whose engine has the fault, for `TaskRun` and `DistanceRun`."""

    def build(setup: Setup, texts: SubjectTokenizer, tokens: int) -> Subject:
        ops = _FaultyOps(fault, setup.threads, layer=texts.source.spec.layers // 2)
        # No recorder: a recorded pass would leave out what Python does here.
        kernels = KernelSet(ops, ops, ops, None)
        engine = Engine(setup.config(texts.source, tokens), kernels=kernels)
        return Subject(setup, texts, tokens, engine)

    return build
