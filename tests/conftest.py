"""What every test may use: few threads, the hypothesis profiles, the default model."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from bifolio.checkpoint.source import ModelSource, resolve_source
from bifolio.process.logs import _StandardError

ANY_MACHINE: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],  # which measures the machine
}
settings.register_profile("default", derandomize=True, **ANY_MACHINE)  # `soak` looks for new cases
settings.register_profile("soak", max_examples=20_000, **ANY_MACHINE)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


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
    root = logging.getLogger()
    ours = [handler for handler in root.handlers if isinstance(handler, _StandardError)]
    if ours:
        root.handlers = [handler for handler in root.handlers if handler not in ours]
        root.setLevel(logging.WARNING)
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def smollm2() -> ModelSource:
    """SmolLM2-135M-Instruct as GGUF, fetched once into the model cache."""
    return resolve_source("smollm2-135m")
