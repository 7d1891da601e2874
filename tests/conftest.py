"""What every test may use: few threads, the hypothesis profiles, the default model."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from bifolio.models.source import ModelSource, resolve_source

settings.register_profile("default", deadline=None)
settings.register_profile("soak", deadline=None, max_examples=20_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session")
def smollm2() -> ModelSource:
    """SmolLM2-135M-Instruct as GGUF, fetched once into the model cache."""
    return resolve_source("smollm2-135m")
