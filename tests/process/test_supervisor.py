"""One engine that is replaced when it dies: nothing hangs, and tries are bounded."""

import asyncio
import contextlib
import time

import pytest

from bifolio.errors import CheckpointError, EngineDeadError
from bifolio.process.client import AsyncEngine
from bifolio.process.supervisor import EngineSupervisor
from bifolio.request import Request, SamplingParams
from support.scripted_engine import FACTORY, Script, scripted_config

PATIENCE = 60.0
KILL, HANG = 101, 103
SCRIPT = Script(kill_id=KILL, hang_id=HANG)


@contextlib.asynccontextmanager
async def supervised(*scripts, **options):
    """Engines by these scripts in turn, the last of them again and again."""
    made = []

    def make():
        script = scripts[min(len(made), len(scripts) - 1)]
        made.append(script)
        return AsyncEngine(scripted_config(script), factory=FACTORY, beat_timeout=PATIENCE)

    engine = EngineSupervisor(make, first_backoff=0.01, **options)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def answer(engine, prompt):
    tokens = []
    sampling = SamplingParams(max_tokens=10, temperature=0.0)
    request = Request(id=f"r{time.monotonic()}", prompt_ids=prompt, sampling=sampling)
    async with contextlib.aclosing(engine.generate(request)) as outputs:
        async for output in outputs:
            tokens += output.tokens
    return tokens


async def until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        await asyncio.sleep(0.01)


async def test_open_requests_end_and_the_next_engine_serves():
    async with supervised(SCRIPT) as engine:
        assert await answer(engine, [7, 8]) == [7, 8, 2]
        with pytest.raises(EngineDeadError):
            await answer(engine, [7, KILL])
        await until(lambda: engine.restarts == 1)
        engine.check_ready()
        assert await answer(engine, [9]) == [9, 2]
        assert engine.open_requests == 0


async def test_while_it_is_down_requests_and_health_say_why():
    async with supervised(SCRIPT, SCRIPT) as engine:
        engine._first_backoff = 3600.0
        with pytest.raises(EngineDeadError):
            await answer(engine, [KILL])
        await until(lambda: engine._down)
        for ask in (engine.check_health, engine.check_ready):
            with pytest.raises(EngineDeadError, match="is being restarted"):
                ask()
        with pytest.raises(EngineDeadError, match="is being restarted"):
            await answer(engine, [7])


async def test_a_frozen_engine_counts_as_dead():
    async with supervised(SCRIPT, silence_seconds=1.0) as engine:
        with pytest.raises(EngineDeadError):
            await answer(engine, [HANG])
        await until(lambda: engine.restarts == 1)
        assert await answer(engine, [9]) == [9, 2]


@pytest.mark.parametrize("broken", [Script(load_error="no weights"), Script(load_killed=True)])
async def test_tries_are_bounded_and_the_last_reason_is_told(broken):
    async with supervised(SCRIPT, broken, max_restarts=3) as engine:
        with pytest.raises(EngineDeadError):
            await answer(engine, [KILL])
        why = await asyncio.wait_for(engine.failed, PATIENCE)
        assert "4 times" in why
        assert engine.restarts == 0
        with pytest.raises(EngineDeadError, match="4 times"):
            engine.check_health()


async def test_an_engine_that_dies_again_and_again_is_given_up():
    async with supervised(SCRIPT, max_restarts=2) as engine:
        for restarts in range(3):
            await until(lambda count=restarts: engine.restarts == count and not engine._down)
            with pytest.raises(EngineDeadError):
                await answer(engine, [KILL])
        assert "3 times" in await asyncio.wait_for(engine.failed, PATIENCE)


async def test_a_first_start_that_fails_is_raised_and_not_tried_again():
    made = []

    def make():
        made.append(1)
        return AsyncEngine(scripted_config(Script(load_error="no weights")), factory=FACTORY)

    engine = EngineSupervisor(make)
    with pytest.raises(CheckpointError, match="no weights"):
        await engine.start()
    assert made == [1]
