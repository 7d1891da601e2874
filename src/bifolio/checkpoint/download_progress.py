"""Reports the progress of a download."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

Report = Callable[[str, int, int], None]
"""Called while something takes long: its name, bytes done, bytes in total (0: not known)."""


def silent(stage: str, done: int, total: int) -> None:
    """Reports no progress."""


def hub_bar(report: Report, stage: str) -> type[Any]:
    """A class for `tqdm_class` of huggingface_hub whose bars report instead of drawing."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            options |= {"disable": False, "file": io.StringIO()}
            super().__init__(*args, **options)  # type: ignore[no-untyped-call]

        def display(self, *_: Any, **__: Any) -> bool:
            if self.unit == "B" and self.total:
                report(stage, int(self.n), int(self.total))
            return True

    return Bar
