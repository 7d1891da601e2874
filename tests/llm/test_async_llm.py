"""AsyncLLM: many tasks at a time, cancelled tasks, and an engine process that dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio

from bifolio import AsyncLLM, ConfigError, EngineDeadError, RequestError, SamplingParams
from support.e2e_harness import until
from support.tiny_llm import OPTIONS

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llm(folder: Path) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(str(folder), **OPTIONS, max_num_seqs=4, max_waiting=4) as llm:
        yield llm


async def until_idle(llm: AsyncLLM) -> None:
    before = llm.stats

    def idle() -> bool:
        stats = llm.stats
        return stats is not before and not (stats.running or stats.waiting or stats.live_pages)

    await until(idle)


async def test_batches_of_several_tasks_are_larger_than_the_line_of_the_engine(
    llm: AsyncLLM,
) -> None:
    batches = [[f"the {i} of {j}" for i in range(12)] for j in range(3)]
    found = await asyncio.gather(*(llm.generate(batch, GREEDY, n=2) for batch in batches))
    for outputs, batch in zip(found, batches, strict=True):
        assert [output.prompt for output in outputs] == batch
        assert {answer.finish_reason for o in outputs for answer in o.outputs} == {"length"}
    assert await llm.generate([]) == []


async def test_streams_wait_for_room_and_end_complete(llm: AsyncLLM) -> None:
    async def text(number: int) -> list[int]:
        pieces = llm.stream(f"the {number}", GREEDY)
        return [token async for piece in pieces for token in piece.token_ids]

    found = await asyncio.gather(*map(text, range(20)))
    assert [len(tokens) for tokens in found] == [6] * 20


async def test_a_cancelled_task_and_a_stream_that_is_left_end_their_requests(
    llm: AsyncLLM,
) -> None:
    task = asyncio.create_task(llm.generate(["a", "b", "c"], LONG))
    await until(lambda: llm._engine.open_requests > 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_idle(llm)
    async with aclosing(llm.stream("the", LONG)) as pieces:
        async for piece in pieces:
            assert piece.token_ids
            break
    await until_idle(llm)
    (output,) = await llm.generate("the", GREEDY)
    assert len(output.outputs[0].token_ids) == 6


async def test_invalid_input_is_refused(llm: AsyncLLM) -> None:
    with pytest.raises(RequestError, match="did you mean max_tokens"):
        await llm.generate("a", max_tokns=1)
    with pytest.raises(RequestError, match="n: 5 answers are more than max_waiting=4"):
        await llm.generate("a", n=5)
    with pytest.raises(RequestError, match="at least one message"):
        await llm.chat([])
    with pytest.raises(RequestError, match=r"prompts\[1\]"):
        await llm.generate(["a", ""])
    with pytest.raises(RequestError, match="hint: open a stream for each"):
        await anext(llm.stream(["a", "b"]))


async def test_before_the_start_and_after_the_end_it_says_so(folder: Path) -> None:
    llm = AsyncLLM(str(folder), **OPTIONS)
    with pytest.raises(EngineDeadError, match="hint: use it within `async with`"):
        await llm.generate("a")
    await llm.close()
    with pytest.raises(ConfigError, match="did you mean 'threads'"):
        await AsyncLLM(str(folder), thread=1).start()


async def test_a_process_that_dies_ends_what_is_open_and_loses_nothing_that_is_done(
    folder: Path,
) -> None:
    async with AsyncLLM(str(folder), **OPTIONS) as llm:
        assert llm._engine is not None
        stream = llm.stream("the", LONG)
        assert (await anext(stream)).token_ids

        async def kill_when_short_ones_are_done() -> None:
            await until(lambda: llm._engine is not None and llm._engine.open_requests == 2)
            assert llm._engine is not None
            os.kill(llm._engine.pid, signal.SIGKILL)

        killing = asyncio.create_task(kill_when_short_ones_are_done())
        waiting = asyncio.create_task(llm.generate(["a", "b", "the"], [GREEDY, GREEDY, LONG]))
        outputs = await waiting
        await killing
        reasons = [output.outputs[0].finish_reason for output in outputs]
        assert reasons == ["length", "length", "error"]
        assert isinstance(outputs[2].outputs[0].error, EngineDeadError)
        with pytest.raises(EngineDeadError, match="has ended"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDeadError, match="hint: create another AsyncLLM"):
            await llm.generate("a")
