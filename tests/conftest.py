"""What every test may use: few threads, the hypothesis profiles, the default model."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from bifolio.process.logs import _StandardError

if TYPE_CHECKING:
    from bifolio.checkpoint.source import ModelSource

ANY_MACHINE: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],  # which measures the machine
}
settings.register_profile("default", derandomize=True, **ANY_MACHINE)  # `soak` looks for new cases
settings.register_profile("soak", max_examples=20_000, **ANY_MACHINE)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


class _NoTensors(MetaPathFinder):
    """Skips the module or test that imports torch or numpy."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname in ("torch", "numpy"):
            pytest.skip(f"needs {fullname}", allow_module_level=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only what needs neither torch nor numpy")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--quick"):
        sys.meta_path.insert(0, _NoTensors())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long runs are not held to the time limit of short ones, however they are started."""
    for item in items:
        if item.get_closest_marker("soak") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(0))


@pytest.fixture(autouse=True)
def logging_restored() -> Iterator[None]:
    """Commands that run within tests and fixtures set up logging for their process."""
    _restore_logging()
    yield
    _restore_logging()


def _restore_logging() -> None:
    logging.getLogger("bifolio").setLevel(logging.NOTSET)
    root = logging.getLogger()
    ours = [handler for handler in root.handlers if isinstance(handler, _StandardError)]
    if ours:
        root.handlers = [handler for handler in root.handlers if handler not in ours]
        root.setLevel(logging.WARNING)
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def smollm2() -> ModelSource:
    """SmolLM2-135M-Instruct as GGUF, fetched once into the model cache."""
    from bifolio.checkpoint.source import resolve_source  # which loads torch

    return resolve_source("smollm2-135m")
