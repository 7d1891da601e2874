import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bifolio.core.step import PageStamp, StepRow
from bifolio.formats import CACHE_BF16
from bifolio.request import SamplingParams
from bifolio.runtime.pool import KVPool
from bifolio.runtime.verify import ExpectedPages
from bifolio.spec import PageSpec
from bifolio.spec.page import HEADER_TAG

PAGES = 24


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
    lengths: list[int], data: st.DataObject
) -> None:
    pool, rows, expected, table = scene(lengths)
    assert expected.faults(pool, table) == {}
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
    faults = expected.faults(pool, table)
    assert set(faults) == {victim}
    assert faults[victim].page == page
    assert faults[victim].expected == rows[victim].tags[place]


def test_two_tables_exchanged_between_rows_are_both_faults() -> None:
    pool, _, expected, table = scene([3, 3])
    table[[0, 1]] = table[[1, 0]]
    assert set(expected.faults(pool, table)) == {0, 1}


def test_pages_behind_the_counted_ones_are_not_looked_at() -> None:
    pool, rows, _, table = scene([4])
    pool.headers[rows[0].page_ids[3], HEADER_TAG] = 5
    assert ExpectedPages(rows, [3]).faults(pool, table) == {}
    assert set(ExpectedPages(rows, [4]).faults(pool, table)) == {0}


@pytest.mark.parametrize("rows", [1, 32])
def test_no_rows_or_sound_rows_give_no_faults(rows: int) -> None:
    pool = KVPool(PageSpec(1, 1, 16, CACHE_BF16, 16), 2)
    assert ExpectedPages([], []).faults(pool, np.zeros((rows, 1), np.int32)) == {}
