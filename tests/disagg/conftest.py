from collections.abc import Iterator

import pytest

from support.handoff_pair import Pair


@pytest.fixture(autouse=True)
def closed_pairs() -> Iterator[None]:
    """Close the connections that a test has left open."""
    yield
    while Pair.opened:
        Pair.opened.pop().close()
