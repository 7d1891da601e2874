"""The examples in the docstrings give what they say, on the tiny model."""

from __future__ import annotations

import ast
import contextlib
import doctest
import inspect
import io
from pathlib import Path
from typing import Any

import pytest

import bifolio.llm.pending
from bifolio import LLM, AsyncLLM, SamplingParams
from bifolio.checkpoint.source import ModelSource
from support.tiny_llm import OPTIONS

SYNC = [LLM, LLM.generate, LLM.chat, LLM.stream, LLM.tokenizer, LLM.stats, SamplingParams]
ASYNC = [AsyncLLM, AsyncLLM.generate, AsyncLLM.chat, AsyncLLM.stream]


@pytest.fixture(autouse=True)
def tiny_for_smollm2(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(name: str, report: object) -> ModelSource:
        del report
        return ModelSource(name, folder if name == "smollm2-135m" else Path(name))

    monkeypatch.setattr(bifolio.llm.pending, "resolve_source", resolve)


async def run_examples(text: str, names: dict[str, Any]) -> None:
    """Run the examples of a text, which may use `await`, and compare what they print."""
    examples = doctest.DocTestParser().get_examples(text)
    assert examples, "there is no example"
    for example in examples:
        code = compile(example.source, "<example>", "single", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            result = eval(code, names)
            if inspect.iscoroutine(result):
                await result
        assert printed.getvalue() == example.want, example.source


def documented(item: Any) -> str:
    text = inspect.getdoc(item)
    assert text is not None
    return text


@pytest.mark.parametrize("item", SYNC, ids=lambda item: getattr(item, "__qualname__", "property"))
async def test_examples(item: Any, llm: LLM) -> None:
    await run_examples(documented(item), {"llm": llm, "LLM": LLM, "SamplingParams": SamplingParams})


async def test_async_examples(folder: Path) -> None:
    async with AsyncLLM(str(folder), **OPTIONS) as llm:
        for item in ASYNC:
            await run_examples(documented(item), {"llm": llm, "AsyncLLM": AsyncLLM})
