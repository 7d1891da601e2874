"""Attention over latents, dense and sparse, and the indexer's choice: right, and the same bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bifolio.kernels import native
from bifolio.kernels.latent import rows as tokens_of_rows
from bifolio.kernels.latent_pages import read_index_keys, write_latents
from bifolio.kernels.reference import ReferenceOps
from support.latent_batches import (
    LatentCase,
    choose,
    dense_latent_attention,
    latent_part,
    make_latent_case,
)

FORMATS = ("fp32", "bf16", "fp8", "fp8:token")
ISAS = native.isas() if native.available() else ()

# As for attention over keys and values: weights rounded to bf16, or nothing but float32 sums.
BOUND = {"fp32": 2**-18, "bf16": 2**-7, "fp8": 2**-7, "fp8:token": 2**-7}


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    torch.set_num_threads(1)


def attend(ops: native.NativeOps, case: LatentCase) -> torch.Tensor:
    scale = case.q_thr.shape[2] ** -0.5
    return ops.latent_attention(case.q_thr, case.batch, case.cache, scale, case.chosen_tk).clone()


def assert_close(case: LatentCase, got: torch.Tensor) -> None:
    want, magnitude = dense_latent_attention(case, case.q_thr.shape[2] ** -0.5)
    excess = (got.double() - want).abs() / (magnitude + 1e-6)
    assert float(excess.max()) <= BOUND[str(case.cache.spec.cache)]  # NaN fails too


@st.composite
def cases(draw: st.DrawFn, longest: int = 700) -> LatentCase:
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        length = draw(st.integers(1, 80) | st.integers(1, longest))
        rows.append((length, draw(st.just(1) | st.integers(1, min(length, 60)))))
    case = make_latent_case(
        rows,
        cache_format=draw(st.sampled_from(FORMATS)),
        page_size=draw(st.sampled_from((16, 32, 64, 256))),
        heads=draw(st.integers(1, 9) | st.just(64)),
        kv_lora=16 * draw(st.integers(1, 10) | st.just(32)),
        rope=16 * draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
    top_k = draw(st.none() | st.integers(1, 400))
    return case if top_k is None else choose(case, top_k)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=25, deadline=None)
@given(case=cases(), threads=st.integers(1, 3))
def test_outputs_match_latent_attention_in_float64(
    isa: str, case: LatentCase, threads: int
) -> None:
    assert_close(case, attend(native.NativeOps(threads, isa), case))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cache_format", FORMATS)
@pytest.mark.parametrize("top_k", [None, 90])
@pytest.mark.parametrize("heads", [3, 16])
def test_a_token_has_the_same_bits_alone_in_a_batch_chunked_and_at_any_thread_count(
    isa: str, cache_format: str, top_k: int | None, heads: int
) -> None:
    rows = [(300, 300), (1, 1), (513, 3), (1030, 1), (256, 17), (64, 1)]
    case = make_latent_case(rows, cache_format=cache_format, heads=heads, seed=3)
    case = case if top_k is None else choose(case, top_k)
    together = attend(native.NativeOps(1, isa), case)
    for threads in (2, 5):
        assert torch.equal(together, attend(native.NativeOps(threads, isa), case))
    ops = native.NativeOps(2, isa)
    starts = case.batch.query_start_r1.tolist()
    for row, (_, queries) in enumerate(rows):
        for chunk in (1, 13):
            first = 0 if chunk > 1 else max(0, queries - 20)
            for at in range(first, queries, chunk):
                count = min(chunk, queries - at)
                alone = attend(ops, latent_part(case, row, at, count))
                begin = starts[row] + at
                assert torch.equal(alone, together[begin : begin + count]), (row, at, count)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cache_format", FORMATS)
def test_to_choose_all_positions_gives_the_bits_of_dense_attention(
    isa: str, cache_format: str
) -> None:
    case = make_latent_case([(300, 40), (77, 1)], cache_format=cache_format, page_size=32)
    ops = native.NativeOps(2, isa)
    assert torch.equal(attend(ops, choose(case, 10_000)), attend(ops, case))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cache_format", FORMATS)
@pytest.mark.parametrize("top_k", [None, 50])
def test_slots_and_pages_beyond_the_length_never_matter(
    isa: str, cache_format: str, top_k: int | None
) -> None:
    ops = native.NativeOps(2, isa)
    for length in (1, 15, 16, 17, 63, 64, 65, 256, 257):
        poisoned, zeroed = (
            make_latent_case([(length, 1)], cache_format=cache_format, poison=byte)
            for byte in (0xFF, 0)
        )
        if top_k is not None:
            poisoned, zeroed = choose(poisoned, top_k), choose(zeroed, top_k)
        got = attend(ops, poisoned)
        assert_close(poisoned, got)
        assert torch.equal(got, attend(ops, zeroed))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cache_format", FORMATS)
def test_a_later_token_of_the_chunk_cannot_touch_an_earlier_one(
    isa: str, cache_format: str
) -> None:
    ops = native.NativeOps(2, isa)
    case = make_latent_case([(100, 100)], cache_format=cache_format)
    sound = attend(ops, case)
    for first in (99, 50, 33):
        position = torch.arange(first, 100)
        page = case.batch.block_table_rp[0, position // 16].long()
        nan = torch.full((len(position), case.q_thr.shape[2]), torch.nan)
        kv_lora = case.latent.kv_lora
        write_latents(case.cache, page, position % 16, nan[:, :kv_lora], nan[:, kv_lora:])
        got = attend(ops, case)
        assert torch.equal(got[:first], sound[:first])
        assert got[first:].isnan().all()


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(1, 600),
    queries=st.integers(1, 30),
    top_k=st.integers(1, 300),
    heads=st.integers(1, 9),
    dim=st.sampled_from((16, 48, 128)),
    cache_format=st.sampled_from(FORMATS),
    page_size=st.sampled_from((16, 64)),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_chosen_positions_are_the_best_ones(
    isa: str, length: int, queries: int, top_k: int, heads: int, dim: int, cache_format: str,
    page_size: int, seed: int,
) -> None:  # fmt: skip
    """By scores in float64: nothing that is left out is better than what is taken, but for the
    rounding of float32 sums."""
    rows = [(length, min(queries, length)), (40, 2)]
    case = make_latent_case(
        rows, cache_format=cache_format, page_size=page_size, index_dim=dim, seed=seed
    )
    generator = torch.Generator().manual_seed(seed)
    tokens = case.q_thr.shape[0]
    q_thd = torch.randn(tokens, heads, dim, generator=generator).to(torch.bfloat16).float()
    weights_th = torch.randn(tokens, heads, generator=generator)
    ops = native.NativeOps(2, isa)
    args = (q_thd, weights_th, case.batch, case.cache, dim**-0.5, top_k)
    chosen_tk = ops.index_select(*args)
    assert chosen_tk.shape == (tokens, min(top_k, max(length, 40)))
    for pages, places in tokens_of_rows(case.batch):
        key_sd = read_index_keys(case.cache, pages, places[-1][1] + 1).double()
        for token, position in places:
            chosen = chosen_tk[token][chosen_tk[token] >= 0]
            assert len(chosen) == min(top_k, position + 1)
            assert (chosen_tk[token, len(chosen) :] == -1).all()
            assert (chosen.diff() > 0).all()
            score_hs = (q_thd[token].double() @ key_sd[: position + 1].T * dim**-0.5).relu()
            score_s = weights_th[token].double() @ score_hs
            left_out = torch.ones(position + 1, dtype=torch.bool)
            left_out[chosen] = False
            if left_out.any():
                slack = 1e-5 * (weights_th[token].double().abs() @ score_hs).max()
                assert score_s[chosen].min() >= score_s[left_out].max() - slack


@pytest.mark.parametrize("isa", ISAS)
def test_equal_scores_go_to_the_earlier_positions(isa: str) -> None:
    """Zero weights make every score zero, of either sign."""
    case = make_latent_case([(200, 5)], index_dim=16)
    weights = torch.tensor([0.0, -0.0]).expand(5, 2)
    q_thd = torch.randn(5, 2, 16, generator=torch.Generator().manual_seed(1))
    for ops in (native.NativeOps(2, isa), ReferenceOps()):
        chosen = ops.index_select(q_thd, weights, case.batch, case.cache, 0.25, 20)
        assert torch.equal(chosen, torch.arange(20).expand(5, 20))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cache_format", ["fp32", "bf16"])
def test_a_choice_does_not_depend_on_neighbours_or_threads(isa: str, cache_format: str) -> None:
    case = make_latent_case([(300, 90), (500, 2)], cache_format=cache_format, index_dim=32)
    generator = torch.Generator().manual_seed(5)
    q_thd = torch.randn(92, 7, 32, generator=generator)
    weights_th = torch.randn(92, 7, generator=generator)
    ops = native.NativeOps(2, isa)

    def pick(one: LatentCase, tokens: slice, by: native.NativeOps) -> torch.Tensor:
        rest = (one.batch, one.cache, 0.2, 64)
        return by.index_select(q_thd[tokens], weights_th[tokens], *rest).clone()

    together = pick(case, slice(0, 92), ops)
    assert torch.equal(together, pick(case, slice(0, 92), native.NativeOps(1, isa)))
    for first in range(0, 90, 9):
        alone = pick(latent_part(case, 0, first, 9), slice(first, first + 9), ops)
        assert torch.equal(alone, together[first : first + 9, : alone.shape[1]])
