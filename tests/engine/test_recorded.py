"""Recordings of decode steps: replayed for their own batch, and bounded in number and memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bifolio.engine.batch import BatchBuffers
from bifolio.engine.recorded import RecordedModel
from bifolio.kernels.ops import Batch, LayerCache

VOCAB = 1000


class CountingModel:
    """A model and its recorder in one; `passes` and `replays` count the rows of each."""

    def __init__(self) -> None:
        self.passes: list[int] = []
        self.replays: list[int] = []

    def forward(self, batch: Batch, _caches: list[LayerCache]) -> torch.Tensor:
        self.passes.append(batch.context_len_r.shape[0])
        return torch.zeros(self.passes[-1], VOCAB)

    @contextmanager
    def record(self) -> Iterator[CountingTape]:
        tape = CountingTape(self)
        yield tape
        tape.rows = self.passes[-1]


class CountingTape:
    def __init__(self, model: CountingModel) -> None:
        self._model = model
        self.rows = 0

    def replay(self) -> None:
        self._model.replays.append(self.rows)


def step(recorded: RecordedModel, buffers: BatchBuffers, rows: int) -> None:
    logits = recorded.forward(buffers._batch(rows, rows, rows), [])
    assert logits.shape == (rows, VOCAB)


def test_a_shape_that_comes_again_is_replayed_and_one_of_other_buffers_is_not() -> None:
    model, buffers = CountingModel(), BatchBuffers(8, 8, 4, 16)
    recorded = RecordedModel(model, model)
    for rows in (3, 5, 3, 5):
        step(recorded, buffers, rows)
    assert (model.passes, model.replays) == ([3, 5], [3, 5])
    step(recorded, BatchBuffers(8, 8, 4, 16), 3)
    assert (model.passes, model.replays) == ([3, 5, 3], [3, 5])


def test_the_least_recently_used_recordings_make_room() -> None:
    model, buffers = CountingModel(), BatchBuffers(8, 8, 4, 16)
    recorded = RecordedModel(model, model, capacity=2)
    for rows in (1, 2, 1, 3, 1, 2):  # 3 drives out 2, and 2 drives out 3
        step(recorded, buffers, rows)
    assert (model.passes, model.replays) == ([1, 2, 3, 2], [1, 1])


def test_recordings_keep_no_more_logits_than_they_may() -> None:
    model, buffers = CountingModel(), BatchBuffers(64, 64, 4, 16)
    most = 40 * VOCAB * 4
    recorded = RecordedModel(model, model, most_bytes=most)
    for rows in range(1, 65):
        step(recorded, buffers, rows)
        held = [recording.logits_lv.shape[0] for recording in recorded._recordings.values()]
        assert sum(held) <= 40 or held == [rows]  # the last one is always kept
    step(recorded, buffers, 64)
    assert model.replays == [64]
