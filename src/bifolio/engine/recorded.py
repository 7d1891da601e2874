"""A model whose decode steps are recorded once per batch shape and replayed natively."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bifolio.kernels.ops import Batch, LayerCache

_MOST_LOGITS_BYTES = 256 << 20
"""All batches of up to 64 rows of a vocabulary of 152 k would keep 1.3 GB."""


class StepModel(Protocol):
    """A decoder: logits float32 [l, vocab] of `batch.logits_index_l`."""

    def forward(self, batch: Batch, caches: list[LayerCache]) -> Tensor: ...


class CallTape(Protocol):
    """The kernel calls of one pass."""

    def replay(self) -> None: ...


class Recorder(Protocol):
    """A kernel set that can record a pass (`kernels.native.NativeOps`)."""

    def record(self) -> AbstractContextManager[CallTape]: ...


@dataclass(frozen=True, slots=True)
class _Recording:
    tape: CallTape
    batch: Batch
    logits_lv: Tensor


class RecordedModel:
    """Wraps a model so that a decode step costs one native call for all layers.

    Only passes of one token per row are recorded: their shapes come again. Each recording belongs
    to the very buffers of its batch, and the least recently used are dropped: of more than
    `capacity`, or if the logits, which each keeps a place for, take more than `most_bytes`.
    """

    def __init__(
        self,
        model: StepModel,
        recorder: Recorder,
        capacity: int = 64,
        most_bytes: int = _MOST_LOGITS_BYTES,
    ) -> None:
        self._model = model
        self._recorder = recorder
        self._capacity = capacity
        self._most_bytes = most_bytes
        self._recordings: OrderedDict[int, _Recording] = OrderedDict()

    def forward(self, batch: Batch, caches: list[LayerCache]) -> Tensor:
        rows = batch.context_len_r.shape[0]
        if not batch.token_ids_t.shape[0] == batch.logits_index_l.shape[0] == rows:
            return self._model.forward(batch, caches)
        found = self._recordings.get(rows)
        if found is not None and found.batch is batch:
            self._recordings.move_to_end(rows)
            found.tape.replay()
            return found.logits_lv
        with self._recorder.record() as tape:
            logits = self._model.forward(batch, caches)
        self._recordings[rows] = _Recording(tape, batch, logits)
        self._recordings.move_to_end(rows)
        while len(self._recordings) > self._capacity or self._held_too_much():
            self._recordings.popitem(last=False)
        return logits

    def _held_too_much(self) -> bool:
        held = sum(recording.logits_lv.nbytes for recording in self._recordings.values())
        return held > self._most_bytes and len(self._recordings) > 1
