"""What an engine cannot start with is refused with the number to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from bifolio.config import EngineConfig
from bifolio.engine.engine import Engine
from bifolio.errors import ConfigError
from bifolio.formats import PrecisionPlan
from bifolio.testing.tiny import tiny_config, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), tiny_config("llama"))


def start(folder: Path, **options: int) -> Engine:
    plan = PrecisionPlan.parse("bf16/bf16")
    return Engine(EngineConfig(model=str(folder), plan=plan, kernels="reference", **options))


@pytest.mark.parametrize("size", [2**55, 2**70])
def test_a_cache_that_the_system_has_no_memory_for(folder: Path, size: int) -> None:
    with pytest.raises(ConfigError, match="ask for less cache_memory"):
        start(folder, cache_memory=size)


def test_a_context_that_the_cache_cannot_hold(folder: Path) -> None:
    page = start(folder, cache_memory=2**20).pool.spec
    size = 4 * page.page_bytes
    assert start(folder, cache_memory=size).max_model_len == 4 * page.page_size
    start(folder, cache_memory=size, max_model_len=4 * page.page_size)
    with pytest.raises(ConfigError, match=rf"beyond the {4 * page.page_size} tokens"):
        start(folder, cache_memory=size, max_model_len=4 * page.page_size + 1)
