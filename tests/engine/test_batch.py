from __future__ import annotations

from bifolio.engine.batch import BatchBuffers, Segment
from bifolio.request import SamplingParams
from bifolio.scheduler.step import StepRow


def segment(tokens: int) -> Segment:
    row = StepRow(
        request_id="r",
        generation=0,
        start=0,
        token_ids=[7] * tokens,
        prompt_len=tokens,
        page_ids=[],
        tags=[],
        logits_from=tokens - 1,
        sample=True,
        sampling=SamplingParams(),
        prompt_ids=[7] * tokens,
        output_ids=[],
    )
    return Segment(row, 0, tokens)


def test_a_decode_shape_has_one_batch_so_that_its_recording_is_found_again() -> None:
    buffers = BatchBuffers(64, 8, 4, 16)
    two = buffers.fill([segment(1)] * 2)
    assert buffers.fill([segment(1)] * 3) is not two
    assert buffers.fill([segment(1)] * 2) is two


def test_shapes_of_prefill_leave_nothing_behind() -> None:
    buffers = BatchBuffers(64, 8, 4, 16)
    for rows in range(1, 8):
        for tokens in range(2, 9):
            batch = buffers.fill([segment(1)] * (rows - 1) + [segment(tokens)])
            assert batch.token_ids_t.shape == (rows - 1 + tokens,)
            assert batch.logits_index_l.tolist() == [*range(rows - 1), rows + tokens - 2]
    assert len(buffers._batches) == 0
