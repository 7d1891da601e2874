"""Paged attention: right for every shape and format, and the same bits on every path."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bifolio.kernels import native, paged
from support.paged_batches import PagedCase, dense_attention, make_case, part

FORMATS = ("fp32", "bf16", "fp8", "fp8:token")
ISAS = native.isas() if native.available() else ()

# Softmax weights are rounded to bf16 (8 bits: by at most 2^-8 of each) above the line and, in their
# sum, below it. Over fp32 pages all is float32: sums of 4096 terms keep well within 2^-18.
BOUND = {"fp32": 2**-18, "bf16": 2**-7, "fp8": 2**-7, "fp8:token": 2**-7}


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    torch.set_num_threads(1)


def attend(ops: native.NativeOps, case: PagedCase, window: int | None = None) -> torch.Tensor:
    scale = case.spec.head_dim**-0.5
    return ops.attention(case.q_thd, case.batch, case.cache, case.heads, scale, window).clone()


def assert_close(
    case: PagedCase, got: torch.Tensor, window: int | None = None, bound: float | None = None
) -> None:
    want, magnitude = dense_attention(case, case.spec.head_dim**-0.5, window)
    excess = (got.double() - want).abs() / (magnitude + 1e-6)
    assert float(excess.max()) <= (bound or BOUND[str(case.spec.cache)])  # NaN fails too


@st.composite
def cases(draw: st.DrawFn, longest: int = 1500) -> tuple[PagedCase, int | None]:
    kv_heads = draw(st.integers(1, 3))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 80) | st.integers(1, longest))
        rows.append((length, draw(st.just(1) | st.integers(1, min(length, 150)))))
    case = make_case(
        rows,
        cache_format=draw(st.sampled_from(FORMATS)),
        page_size=draw(st.sampled_from((16, 32, 64, 128, 256))),
        heads=kv_heads * draw(st.integers(1, 8)),
        kv_heads=kv_heads,
        head_dim=16 * draw(st.integers(1, 6) | st.just(8) | st.just(16)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
    return case, draw(st.none() | st.integers(1, 300))


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=25, deadline=None)
@given(drawn=cases(), threads=st.integers(1, 3))
def test_outputs_match_dense_attention_in_float64(
    isa: str, drawn: tuple[PagedCase, int | None], threads: int
) -> None:
    case, window = drawn
    assert_close(case, attend(native.NativeOps(threads, isa), case, window), window)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cache_format", FORMATS)
@pytest.mark.parametrize("group", [3, 8])
@pytest.mark.parametrize("page_size", [16, 64])
def test_a_token_has_the_same_bits_alone_in_a_batch_chunked_and_at_any_thread_count(
    isa: str, cache_format: str, group: int, page_size: int
) -> None:
    rows = [(600, 600), (1, 1), (513, 3), (1030, 1), (256, 17), (64, 1)]
    case = make_case(
        rows,
        cache_format=cache_format,
        page_size=page_size,
        heads=2 * group,
        kv_heads=2,
        head_dim=48,
        seed=3,
    )
    for window in (None, 37, 300):
        together = attend(native.NativeOps(1, isa), case, window)
        for threads in (2, 3, 7):
            assert torch.equal(together, attend(native.NativeOps(threads, isa), case, window))
        ops = native.NativeOps(2, isa)
        starts = case.batch.query_start_r1.tolist()
        for row, (_, queries) in enumerate(rows):
            for chunk in (1, 13, 250):
                first = 0 if chunk > 1 else max(0, queries - 40)
                for at in range(first, queries, chunk):
                    count = min(chunk, queries - at)
                    alone = attend(ops, part(case, row, at, count), window)
                    begin = starts[row] + at
                    assert torch.equal(alone, together[begin : begin + count]), (row, at, count)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cache_format", FORMATS)
@pytest.mark.parametrize("page_size", [16, 64])
def test_slots_and_pages_beyond_the_length_never_matter(
    isa: str, cache_format: str, page_size: int
) -> None:
    """The pool is full of NaN outside the rows, block tables point nowhere behind their pages."""
    ops = native.NativeOps(2, isa)
    for length in (1, 15, 16, 17, 63, 64, 65, 127, 255, 256, 257, 330):
        poisoned, zeroed = (
            make_case([(length, 1)], cache_format=cache_format, page_size=page_size, poison=byte)
            for byte in (0xFF, 0)
        )
        got = attend(ops, poisoned)
        assert_close(poisoned, got)
        assert torch.equal(got, attend(ops, zeroed))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cache_format", FORMATS)
def test_a_later_token_of_the_chunk_cannot_touch_an_earlier_one(
    isa: str, cache_format: str
) -> None:
    """Not even with NaN in its keys and values: 0 * NaN must not be computed."""
    ops = native.NativeOps(2, isa)
    case = make_case([(100, 100)], cache_format=cache_format, seed=5)
    sound = attend(ops, case)
    for poisoned_from in (33, 50, 99):
        spoilt = make_case([(100, 100)], cache_format=cache_format, seed=5)
        fill_nan_from(spoilt, poisoned_from)
        got = attend(ops, spoilt)
        assert torch.equal(got[:poisoned_from], sound[:poisoned_from])
        assert got[poisoned_from:].isnan().all()


def fill_nan_from(case: PagedCase, first: int) -> None:
    position = torch.arange(first, case.rows[0][0])
    shape = (len(position), case.spec.kv_heads, case.spec.head_dim)
    nan = torch.full(shape, torch.nan)
    size = case.spec.page_size
    page = case.batch.block_table_rp[0, position // size].long()
    paged.write(case.cache, page, position % size, nan, nan)


@pytest.mark.parametrize("isa", ISAS)
def test_a_window_never_looks_at_pages_before_it(isa: str) -> None:
    case = make_case([(500, 20)], seed=1)
    want = attend(native.NativeOps(2, isa), case, 40)
    case.batch.block_table_rp[0, : (480 - 40) // 16] = 2**30
    assert torch.equal(attend(native.NativeOps(2, isa), case, 40), want)


@pytest.mark.parametrize("isa", ISAS)
def test_scores_far_apart_neither_overflow_nor_vanish(isa: str) -> None:
    """Scores up to 1000 in size round by 2^-14, which is the relative error of their weights."""
    case = make_case([(400, 5)], cache_format="fp32", spread=300.0, seed=2)
    assert_close(case, attend(native.NativeOps(1, isa), case), bound=2**-12)


@pytest.mark.parametrize("cache_format", ["bf16", "fp8", "fp8:token"])
def test_error_does_not_grow_with_the_context(cache_format: str) -> None:
    errors = [mean_error(cache_format, length) for length in (1024, 8192)]
    assert errors[1] < 1.2 * errors[0]


@pytest.mark.soak
@pytest.mark.parametrize("cache_format", ["bf16", "fp8", "fp8:token"])
def test_error_does_not_grow_up_to_64k_keys(cache_format: str) -> None:
    errors = [mean_error(cache_format, length) for length in (1024, 8192, 65536)]
    assert max(errors[1:]) < 1.2 * errors[0]


def mean_error(cache_format: str, length: int) -> float:
    """Error of one decode token over the magnitude of its output, at equal entropy of the weights.

    A few keys are strong, as in a needle test, so the output does not shrink with the length.
    """
    case = make_case(
        [(length, 1)], cache_format=cache_format, heads=8, kv_heads=1, head_dim=64, seed=length
    )
    case.q_thd *= 4.0
    got = attend(native.NativeOps(2), case)
    want, magnitude = dense_attention(case, case.spec.head_dim**-0.5)
    return float(((got.double() - want).abs() / magnitude).mean())


@pytest.mark.soak
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=12, deadline=None)
@given(drawn=cases(longest=32_768))
def test_outputs_match_dense_attention_up_to_32k_keys(
    isa: str, drawn: tuple[PagedCase, int | None]
) -> None:
    case, window = drawn
    assert_close(case, attend(native.NativeOps(2, isa), case, window), window)


def test_a_recorded_call_follows_the_context_that_stands_in_memory() -> None:
    case = make_case([(900, 1), (40, 1)], heads=6, kv_heads=2, head_dim=64)
    ops = native.NativeOps(3)
    with ops.record() as tape:
        out = ops.attention(case.q_thd, case.batch, case.cache, case.heads, 0.125)
    for lengths in ([1, 40], [600, 3], [900, 1]):
        case.batch.context_len_r.copy_(torch.tensor(lengths))
        tape.replay()
        replayed = out.clone()
        called = ops.attention(case.q_thd, case.batch, case.cache, case.heads, 0.125)
        assert torch.equal(replayed, called)
