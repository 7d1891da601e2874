"""What an engine cannot start with is refused with the number to change."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bifolio.config import EngineConfig, parse_bytes
from bifolio.engine.engine import Engine
from bifolio.errors import ConfigError
from bifolio.formats import PrecisionPlan
from support.tiny import tiny_config, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), tiny_config("llama"))


def start(folder: Path, **options: int) -> Engine:
    plan = PrecisionPlan.parse("bf16/bf16")
    return Engine(EngineConfig(model=str(folder), plan=plan, kernels="reference", **options))


@pytest.mark.parametrize("size", [2**55, 2**62])
def test_a_cache_that_the_system_has_no_memory_for(folder: Path, size: int) -> None:
    with pytest.raises(
        ConfigError, match=r"^the system gives no .*ask for less with --cache-memory"
    ):
        start(folder, cache_memory=size)


def test_a_context_that_the_cache_cannot_hold(folder: Path) -> None:
    page = start(folder, cache_memory=2**20).pool.spec
    size = 4 * page.page_bytes
    assert start(folder, cache_memory=size).max_model_len == 4 * page.page_size
    start(folder, cache_memory=size, max_model_len=4 * page.page_size)
    with pytest.raises(ConfigError, match=rf"beyond the {4 * page.page_size} tokens") as caught:
        start(folder, cache_memory=size, max_model_len=4 * page.page_size + 1)
    hint = re.search(r"give --cache-memory (\S+)", str(caught.value))
    assert hint is not None
    start(folder, cache_memory=parse_bytes(hint[1]), max_model_len=4 * page.page_size + 1)


def test_a_context_beyond_the_model_is_said_before_one_beyond_the_cache(folder: Path) -> None:
    known = start(folder).max_model_len
    with pytest.raises(ConfigError, match=rf"beyond the {known} positions that the model knows"):
        start(folder, cache_memory=2**16, max_model_len=known + 1)


def test_sizes_are_told_as_users_write_them(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--cache-memory 1KiB holds no page"):
        start(folder, cache_memory=1024)
    with pytest.raises(ConfigError, match="that --cache-memory 64KiB holds"):
        start(folder, cache_memory=2**16, max_model_len=start(folder).max_model_len)


def test_an_engine_says_what_cache_the_whole_context_of_its_model_takes(folder: Path) -> None:
    small = start(folder, cache_memory=2**16).hello()
    assert small.max_model_len < small.model_positions
    whole = start(folder, cache_memory=small.model_bytes).hello()
    assert whole.max_model_len == whole.model_positions == small.model_positions
