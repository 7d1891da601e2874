from __future__ import annotations

import pytest

from bifolio.wording import plural


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 threads"), (1, "1 thread"), (2, "2 threads"), (1024, "1024 threads")]
)
def test_one_is_no_plural(count: int, text: str) -> None:
    assert plural(count, "thread") == text
