"""Digests of pages: XXH3-64, judged by the `xxhash` package."""

import numpy as np
import pytest
import torch
import xxhash

from bifolio.kernels import native
from bifolio.kernels.reference_pages import PagesKernels, ReferencePages, xxh3_64

ISAS = native.isas() if native.available() else ()
DATA = np.random.default_rng(7).integers(0, 256, 1 << 20, dtype=np.uint8)
LARGE = [*range(2040, 2060), 4096, 65_537, 368_640, 1_000_003]


@pytest.fixture(params=("reference", *ISAS))
def kernels(request: pytest.FixtureRequest) -> PagesKernels:
    return ReferencePages() if request.param == "reference" else native.NativeOps(2, request.param)


def expected(data: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(data.tobytes())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("start", [0, 1, 7])
def test_digests_of_all_lengths_are_those_of_the_specification(isa: str, start: int) -> None:
    ops = native.NativeOps(1, isa)
    for length in [*range(1101), *LARGE]:
        data = DATA[start : start + length]
        assert ops.digest(data.ctypes.data, length) == expected(data), length


def test_the_reference_digests_long_input_by_the_specification() -> None:
    for length in [*range(241, 1101), *LARGE]:
        assert xxh3_64(DATA[3 : 3 + length]) == expected(DATA[3 : 3 + length]), length


def test_seals_cover_what_lies_behind_the_header_of_the_pages_asked_for(
    kernels: PagesKernels,
) -> None:
    pool = torch.from_numpy(DATA[: 40 * 1088].reshape(40, 1088).copy())
    pages = [39, 0, 17, 17, *range(20, 30)]
    want = [expected(pool[page, 64:].numpy()) for page in pages]
    assert kernels.seals(pool, pages, 64) == want
    pool[:, :64] = 0
    assert kernels.seals(pool, pages, 64) == want


def test_each_single_bit_and_each_exchange_of_words_changes_a_seal(kernels: PagesKernels) -> None:
    """A miss by chance: 600 trials at 2⁻⁶⁴."""
    size = 1088
    rng = np.random.default_rng(1)
    record = DATA[:size]
    changed = np.tile(record, (600, 1))
    for i, copy in enumerate(changed[:300]):
        copy[64 + i * 3 % (size - 64)] ^= 1 << rng.integers(8)
    for copy in changed[300:]:
        words = copy.view(np.uint64)
        a, b = 8 + rng.permutation(size // 8 - 8)[:2]
        words[[a, b]] = words[[b, a]]
    found = kernels.seals(torch.from_numpy(changed), range(600), 64)
    assert expected(record[64:]) not in found
