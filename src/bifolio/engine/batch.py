"""Persistent input buffers of a forward pass, so that recorded passes read fresh values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bifolio.kernels.ops import Batch
from bifolio.scheduler.step import StepRow


@dataclass(frozen=True, slots=True)
class Segment:
    """Positions start … end - 1 of a row that one pass computes; logits from `logits_from` on."""

    row: StepRow
    start: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def logits_from(self) -> int:
        return min(max(self.row.logits_from, self.start), self.end)

    @property
    def token_ids(self) -> list[int]:
        first = self.start - self.row.start
        return self.row.token_ids[first : first + self.tokens]


class BatchBuffers:
    """Buffers for up to `max_tokens` tokens of up to `max_rows` rows of `max_pages` pages each."""

    def __init__(self, max_tokens: int, max_rows: int, max_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._max_context = max_pages * page_size

        def ints(*shape: int) -> NDArray[np.int32]:
            return np.zeros(shape, dtype=np.int32)

        self.token_ids = ints(max_tokens)
        self.positions = ints(max_tokens)
        self.row_of_token = ints(max_tokens)
        self.logits_index = ints(max_tokens)
        self.query_start = ints(max_rows + 1)
        self.context_len = ints(max_rows)
        self.block_table = ints(max_rows, max_pages)
        self._batches: dict[int, Batch] = {}
        """Of one token per row, by the number of rows."""

    def fill(self, segments: list[Segment]) -> Batch:
        """Describe a pass over `segments`, all but the block table; returns views."""
        t = logits = 0
        for r, segment in enumerate(segments):
            end = t + segment.tokens
            self.token_ids[t:end] = segment.token_ids
            self.positions[t:end] = range(segment.start, segment.end)
            self.row_of_token[t:end] = r
            self.query_start[r] = t
            self.context_len[r] = segment.end
            wanted = segment.end - segment.logits_from
            self.logits_index[logits : logits + wanted] = range(end - wanted, end)
            logits += wanted
            t = end
        self.query_start[len(segments)] = t
        return self._batch(t, len(segments), logits)

    def _batch(self, tokens: int, rows: int, logits: int) -> Batch:
        decode = tokens == rows == logits
        batch = self._batches.get(rows) if decode else None
        if batch is None:
            batch = Batch(
                token_ids_t=torch.from_numpy(self.token_ids[:tokens]),
                positions_t=torch.from_numpy(self.positions[:tokens]),
                row_of_token_t=torch.from_numpy(self.row_of_token[:tokens]),
                query_start_r1=torch.from_numpy(self.query_start[: rows + 1]),
                context_len_r=torch.from_numpy(self.context_len[:rows]),
                block_table_rp=torch.from_numpy(self.block_table[:rows]),
                logits_index_l=torch.from_numpy(self.logits_index[:logits]),
                max_context=self._max_context,
            )
            if decode:  # shapes of decode come again, and there are few
                self._batches[rows] = batch
        return batch
