"""The choice of tokens in the native kernel set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bifolio.kernels.reference_sampling import Draw, adjust, needs_adjustment, uniform
from bifolio.kernels.result_arena import Arena
from bifolio.request import TokenLogprobs

if TYPE_CHECKING:
    from bifolio import _native

_RULE = np.dtype(
    [
        ("temperature", "f8"),
        ("top_p", "f8"),
        ("min_p", "f8"),
        ("uniform", "f8"),
        ("top_k", "i8"),
    ]
)
"""`DrawRule` of csrc/kernels/sampling.hpp."""


class NativeSampling:
    """The part of `NativeOps` that chooses tokens. Takes the rows of float32 logits as they lie."""

    _runtime: _native.Runtime
    _arena: Arena

    def greedy(self, logits_lv: Tensor) -> list[int]:
        rows, vocab = logits_lv.shape
        tokens = np.empty(rows, dtype=np.int32)
        self._runtime.greedy(
            logits=logits_lv.data_ptr(),
            tokens=tokens.ctypes.data,
            rows=rows,
            vocab=vocab,
            stride=logits_lv.stride(0),
        )
        return tokens.tolist()

    def choose(self, rows_v: Sequence[Tensor], draws: Sequence[Draw]) -> list[int]:
        # Adjusted rows must stay alive until the kernel has read them.
        adjusted = [i for i, draw in enumerate(draws) if needs_adjustment(draw)]
        kept = list(rows_v)
        for i in adjusted:
            kept[i] = adjust(rows_v[i], draws[i])
        tokens = np.empty(len(kept), dtype=np.int32)
        drawn = [i for i, draw in enumerate(draws) if draw.sampling.temperature > 0]
        for i in set(range(len(kept))).difference(drawn):
            (tokens[i],) = self.greedy(kept[i][None])
        if drawn:
            tokens[drawn] = self._draw([kept[i] for i in drawn], [draws[i] for i in drawn])
        for i in adjusted:  # what counts is whether the row was finite before
            token = max(tokens[i], ~tokens[i])
            tokens[i] = token if self.greedy(rows_v[i][None])[0] >= 0 else ~token
        return tokens.tolist()

    def _draw(self, rows_v: list[Tensor], draws: list[Draw]) -> np.ndarray:
        rules = np.array(
            [
                (
                    d.sampling.temperature,
                    d.sampling.top_p,
                    d.sampling.min_p,
                    uniform(d.sampling.seed or 0, d.position),
                    d.sampling.top_k,
                )
                for d in draws
            ],
            dtype=_RULE,
        )
        pointers = np.array([row.data_ptr() for row in rows_v], dtype=np.uint64)
        vocab = rows_v[0].shape[0]
        workspace = self._arena.take(self._runtime.draw_workspace(vocab=vocab), dtype=torch.uint8)
        tokens = np.empty(len(draws), dtype=np.int32)
        self._runtime.draw(
            rows=pointers.ctypes.data,
            rules=rules.ctypes.data,
            tokens=tokens.ctypes.data,
            workspace=workspace.data_ptr(),
            count=len(draws),
            vocab=vocab,
        )
        return tokens

    def logprobs(self, logits_v: Tensor, token: int, top: int) -> TokenLogprobs:
        top = min(top, logits_v.shape[0])
        values = np.empty(1 + top, dtype=np.float64)
        ids = np.empty(1 + top, dtype=np.int32)
        self._runtime.logprobs(
            logits=logits_v.data_ptr(),
            logprobs=values.ctypes.data,
            ids=ids.ctypes.data,
            vocab=logits_v.shape[0],
            token=token,
            top=top,
        )
        rank, *best = ids.tolist()
        own, *falling = values.tolist()
        return TokenLogprobs(own, rank, list(zip(best, falling, strict=True)))
