import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bifolio.cache.stamps import PageStamp
from bifolio.formats import CACHE_BF16
from bifolio.kernels import native
from bifolio.kernels.reference_pages import PagesKernels, ReferencePages
from bifolio.pages.kv_pool import KVPool
from bifolio.pages.verify import ExpectedPages
from bifolio.request import SamplingParams
from bifolio.scheduler.step import StepRow
from bifolio.spec import PageSpec
from bifolio.spec.page import HEADER_TAG

PAGES = 24
KERNELS = ("reference", *(native.isas() if native.available() else ()))


def make_kernels(name: str) -> PagesKernels:
    return ReferencePages() if name == "reference" else native.NativeOps(1, name)


@pytest.fixture(params=KERNELS, scope="module")
def kernels(request: pytest.FixtureRequest) -> PagesKernels:
    return make_kernels(request.param)


@pytest.fixture(scope="module")
def all_kernels() -> list[PagesKernels]:
    return [make_kernels(name) for name in KERNELS]


def row(name: str, page_ids: list[int], tags: list[int]) -> StepRow:
    tokens = 16 * len(page_ids)
    return StepRow(
        request_id=name,
        generation=0,
        start=tokens - 1,
        token_ids=[1],
        prompt_len=tokens,
        page_ids=page_ids,
        tags=tags,
        logits_from=tokens - 1,
        sample=True,
        sampling=SamplingParams(),
        prompt_ids=[1] * tokens,
        output_ids=[],
    )


def scene(lengths: list[int]) -> tuple[KVPool, list[StepRow], ExpectedPages, np.ndarray]:
    pool = KVPool(PageSpec(1, 1, 16, CACHE_BF16, 16), PAGES)
    free = iter(range(PAGES))
    rows = []
    for i, length in enumerate(lengths):
        pages = [next(free) for _ in range(length)]
        tags = [2**63 + 1000 + page for page in pages]
        pool.stamp([PageStamp(p, t, 1) for p, t in zip(pages, tags, strict=True)])
        rows.append(row(f"r{i}", pages, tags))
    expected = ExpectedPages(rows, lengths)
    table = np.full((len(lengths), 8), -1, dtype=np.int32)
    expected.fill(table)
    return pool, rows, expected, table


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_each_kind_of_wrong_page_faults_its_own_row_only(
    kernels: PagesKernels, lengths: list[int], data: st.DataObject
) -> None:
    pool, rows, expected, table = scene(lengths)
    assert expected.faults(kernels, pool, table) == {}
    victim = data.draw(st.integers(0, len(rows) - 1))
    place = data.draw(st.integers(0, lengths[victim] - 1))
    page = rows[victim].page_ids[place]
    kind = data.draw(st.sampled_from(["swapped", "outside", "negative", "retagged"]))
    if kind == "retagged":
        pool.headers[page, HEADER_TAG] += np.uint64(1)
    else:
        table[victim, place] = {"swapped": (page + 1) % PAGES, "outside": PAGES, "negative": -1}[
            kind
        ]
    faults = expected.faults(kernels, pool, table)
    assert set(faults) == {victim}
    assert faults[victim].page == page
    assert faults[victim].expected == rows[victim].tags[place]


def test_two_tables_exchanged_between_rows_are_both_faults(kernels: PagesKernels) -> None:
    pool, _, expected, table = scene([3, 3])
    table[[0, 1]] = table[[1, 0]]
    assert set(expected.faults(kernels, pool, table)) == {0, 1}


def test_pages_behind_the_counted_ones_are_not_looked_at(kernels: PagesKernels) -> None:
    pool, rows, _, table = scene([4])
    pool.headers[rows[0].page_ids[3], HEADER_TAG] = 5
    assert ExpectedPages(rows, [3]).faults(kernels, pool, table) == {}
    assert set(ExpectedPages(rows, [4]).faults(kernels, pool, table)) == {0}


@pytest.mark.parametrize("rows", [1, 32])
def test_no_rows_give_no_faults(kernels: PagesKernels, rows: int) -> None:
    pool = KVPool(PageSpec(1, 1, 16, CACHE_BF16, 16), 2)
    assert ExpectedPages([], []).faults(kernels, pool, np.zeros((rows, 1), np.int32)) == {}


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.data())
def test_every_kernel_set_finds_the_same_first_wrong_pages(
    all_kernels: list[PagesKernels], lengths: list[int], data: st.DataObject
) -> None:
    lengths[0] = max(lengths[0], 1)
    rows = [
        row(f"r{i}", [1 + p % (PAGES - 1) for p in range(n)], [7] * n)
        for i, n in enumerate(lengths)
    ]
    pool = KVPool(PageSpec(1, 1, 16, CACHE_BF16, 16), PAGES)
    pool.headers[:, HEADER_TAG] = data.draw(
        st.lists(st.sampled_from([7, 7, 7, 2**64 - 1]), min_size=PAGES, max_size=PAGES)
    )
    expected = ExpectedPages(rows, lengths)
    table = np.full((len(lengths), 9), -1, dtype=np.int32)
    expected.fill(table)
    for _ in range(data.draw(st.integers(0, 3))):
        r, p = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.integers(0, 8))
        table[r, p] = data.draw(st.sampled_from([0, PAGES, PAGES - 1, -1, -(2**31), 2**31 - 1]))
    first, *others = [expected.faults(kernels, pool, table) for kernels in all_kernels]
    assert all(found == first for found in others)
