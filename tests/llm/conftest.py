"""A tiny model with recommended sampling, and an LLM over it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bifolio import LLM
from support.tiny import IM_END, tiny_config, write_model
from support.tiny_llm import OPTIONS, RECOMMENDED


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("llm") / "tiny", tiny_config("llama"))
    recommended = {"eos_token_id": [IM_END], "do_sample": True} | RECOMMENDED
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    return folder


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Torch's threads in an engine process would wait for each other on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def llm(folder: Path) -> Iterator[LLM]:
    """For tests that leave it as it was."""
    with LLM(str(folder), **OPTIONS) as llm:
        yield llm
