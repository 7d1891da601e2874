"""The same request gives the same tokens, text and log probabilities by every way in.

Alone, in a batch, streamed, by AsyncLLM, and over HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bifolio import LLM, AnswerPiece, AsyncLLM, CompletionOutput, SamplingParams
from bifolio.checkpoint.source import resolve_source
from bifolio.config import resolve_engine
from bifolio.process.client import ENGINE_FACTORY
from bifolio.text.tokenizer_files import load_text_side
from support.e2e_harness import Running, serving_over
from support.tiny_llm import OPTIONS

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "the capital of the country is in the north"
PARAMS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "seed": 7},
    "many": {
        "seed": 11,
        "top_k": 50,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {5: 2.5, 9: -3.0},
        "min_tokens": 5,
        "n": 3,
    },
    "stopped": {"temperature": 0.8, "seed": 3, "stop": ["e", "th", "1"], "n": 4},
}
COMMON: dict[str, Any] = {"max_tokens": 24, "logprobs": 3}
NEIGHBOURS = [f"neighbour {i} of the river " * (i % 5 + 1) for i in range(11)]


@pytest.fixture(scope="module", params=PARAMS)
def params(request: pytest.FixtureRequest) -> dict[str, Any]:
    return PARAMS[request.param] | COMMON


@pytest.fixture(scope="module")
def alone(llm: LLM, params: dict[str, Any]) -> tuple[CompletionOutput, ...]:
    return llm.generate(PROMPT, **params)[0].outputs


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def async_llm(folder: Path) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(str(folder), **OPTIONS) as llm:
        yield llm


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(folder: Path) -> AsyncIterator[Running]:
    sampling = resolve_source(str(folder)).default_sampling.params
    config = resolve_engine({"model": str(folder)} | OPTIONS)
    text = load_text_side(folder)
    async with serving_over(config, ENGINE_FACTORY, text, sampling=sampling) as running:
        yield running


def joined(pieces: list[AnswerPiece], n: int) -> list[tuple[object, ...]]:
    answers = []
    for index in range(n):
        parts = [piece for piece in pieces if piece.index == index]
        answers.append(
            (
                "".join(piece.text for piece in parts),
                tuple(token for piece in parts for token in piece.token_ids),
                tuple(entry for piece in parts for entry in piece.logprobs or ()),
                parts[-1].finish_reason,
                parts[-1].stop_reason,
            )
        )
    return answers


def fields(answers: tuple[CompletionOutput, ...]) -> list[tuple[object, ...]]:
    return [(a.text, a.token_ids, a.logprobs, a.finish_reason, a.stop_reason) for a in answers]


async def test_in_a_batch_of_others(
    llm: LLM, params: dict[str, Any], alone: tuple[CompletionOutput, ...]
) -> None:
    prompts = [*NEIGHBOURS[:5], PROMPT, *NEIGHBOURS[5:]]
    others = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)
    sampling: list[SamplingParams] = [others] * len(prompts)
    sampling[5] = SamplingParams(**_of(llm.default_sampling) | params)
    assert llm.generate(prompts, sampling)[5].outputs == alone


def _of(sampling: SamplingParams) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in sampling.__struct_fields__}


async def test_streamed(
    llm: LLM, params: dict[str, Any], alone: tuple[CompletionOutput, ...]
) -> None:
    assert joined(list(llm.stream(PROMPT, **params)), len(alone)) == fields(alone)


async def test_by_the_async_twin(
    async_llm: AsyncLLM, params: dict[str, Any], alone: tuple[CompletionOutput, ...]
) -> None:
    outputs = await async_llm.generate([*NEIGHBOURS, PROMPT], **params)
    assert outputs[-1].outputs == alone
    pieces = [piece async for piece in async_llm.stream(PROMPT, **params)]
    assert joined(pieces, len(alone)) == fields(alone)


async def test_over_http(
    llm: LLM, server: Running, params: dict[str, Any], alone: tuple[CompletionOutput, ...]
) -> None:
    response = await server.post("/v1/completions", prompt=PROMPT, echo=True, **params)
    choices = response.json()["choices"]
    (whole,) = llm.generate(PROMPT, prompt_logprobs=COMMON["logprobs"], **params)
    assert whole.outputs == alone
    assert whole.prompt_logprobs is not None
    assert len(choices) == len(alone)
    for choice, answer in zip(choices, alone, strict=True):
        assert choice["text"] == PROMPT + answer.text
        assert choice["finish_reason"] == answer.finish_reason
        assert choice["stop_reason"] == answer.stop_reason
        entries = [*whole.prompt_logprobs, *(answer.logprobs or ())]
        values = [None if entry is None else entry.logprob for entry in entries]
        assert choice["logprobs"]["token_logprobs"] == values


async def test_conversations(llm: LLM, async_llm: AsyncLLM, server: Running) -> None:
    messages = [
        {"role": "system", "content": "the sea"},
        {"role": "user", "content": [{"type": "text", "text": "the river"}]},
    ]
    params: dict[str, Any] = {"seed": 5, "max_tokens": 20}
    (output,) = llm.chat(messages, **params, logprobs=2)
    (answer,) = output.outputs
    assert (await async_llm.chat(messages, **params, logprobs=2))[0].outputs == output.outputs
    pieces = [piece async for piece in async_llm.stream(messages, **params, logprobs=2)]
    assert joined(pieces, 1) == fields(output.outputs)
    body = {"messages": messages, "logprobs": True, "top_logprobs": 2} | params
    reply = (await server.post("/v1/chat/completions", **body)).json()
    (choice,) = reply["choices"]
    assert choice["message"]["content"] == answer.text
    values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert answer.logprobs is not None
    assert values == [entry.logprob for entry in answer.logprobs]
    assert reply["usage"]["prompt_tokens"] == len(output.prompt_token_ids)
    assert reply["usage"]["completion_tokens"] == len(answer.token_ids)
