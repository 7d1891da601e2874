"""The engine process behind AsyncEngine: order, refusals, cancels, death, freezing, orphans."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from bifolio.errors import (
    BifolioError,
    CheckpointError,
    EngineDeadError,
    OverloadedError,
    RequestError,
)
from bifolio.process.client import AsyncEngine
from bifolio.request import ErrorCode, FinishReason, Output, Request, SamplingParams
from support.scripted_engine import FACTORY, Script, scripted_config

QUICK = Script()
LASTING = {"max_model_len": 10**7}
PATIENCE = 60.0
"""Seconds to wait for what is sure to come, on a machine however slow and busy."""
KILL, RAISE, HANG, FAULT = 101, 102, 103, 104


@contextlib.asynccontextmanager
async def running(script=QUICK, *, beat_timeout=PATIENCE, stall_timeout=PATIENCE, **options):
    engine = AsyncEngine(
        scripted_config(script, **options),
        factory=FACTORY,
        beat_timeout=beat_timeout,
        stall_timeout=stall_timeout,
    )
    async with engine:
        yield engine


def request(name, prompt, **sampling):
    params = {"max_tokens": 10**6, "temperature": 0.0} | sampling
    return Request(id=name, prompt_ids=list(prompt), sampling=SamplingParams(**params))


async def collect(engine, req) -> Output:
    """All outputs of a request, joined."""
    total = Output(id=req.id)
    async with contextlib.aclosing(engine.generate(req)) as outputs:
        async for output in outputs:
            output.tokens = total.tokens + output.tokens
            total = output
    return total


async def until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        await asyncio.sleep(0.01)


def is_healthy(engine):
    try:
        engine.check_health()
        engine.check_ready()
    except EngineDeadError as error:
        assert "not answered" in str(error)
        return False
    return True


async def test_a_request_gets_its_tokens_in_order_and_one_finish():
    async with running() as engine:
        assert engine.hello.stop_ids == (2,)
        engine.check_health()
        engine.check_ready()
        output = await collect(engine, request("a", range(10, 60)))
        assert output.tokens == [*range(10, 60), 2]
        assert (output.finish, output.stop_id) == (FinishReason.STOP, 2)
        assert engine.open_requests == 0


async def test_many_requests_at_once_do_not_mix():
    async with running(max_num_seqs=7) as engine:
        rng = random.Random(1)
        prompts = [[rng.randrange(3, 400) for _ in range(1 + i % 23)] for i in range(60)]
        outputs = await asyncio.gather(
            *(collect(engine, request(str(i), prompt)) for i, prompt in enumerate(prompts))
        )
        assert [output.tokens for output in outputs] == [[*prompt, 2] for prompt in prompts]


async def test_a_slow_reader_gets_everything_joined():
    async with running(Script(step_seconds=0.001)) as engine:
        generator = engine.generate(request("a", range(10, 200), logprobs=1, prompt_logprobs=0))
        async with contextlib.aclosing(generator) as outputs:
            pieces = [await anext(outputs)]  # all of it, if the engine was so much faster
            await until(lambda: engine.stats.running == 0 and engine.stats.progress > 300)
            pieces += [output async for output in outputs]
        assert len(pieces) <= 2
        assert [token for piece in pieces for token in piece.tokens] == [*range(10, 200), 2]
        assert len([one for piece in pieces for one in piece.logprobs or ()]) == 191
        assert [piece.prompt_logprobs[0] for piece in pieces if piece.prompt_logprobs] == [None]
        assert pieces[-1].finish is FinishReason.STOP


async def test_refusals_arrive_as_the_errors_they_are_and_the_engine_goes_on():
    script = Script(max_model_len=32, step_seconds=0.01)
    async with running(script, max_num_seqs=1, max_waiting=1) as engine:
        with pytest.raises(RequestError, match="fills the context") as refused:
            await collect(engine, request("long", range(40)))
        assert refused.value.param == "prompt"
        jobs = [asyncio.create_task(collect(engine, request(str(i), [5] * 20))) for i in range(5)]
        results = await asyncio.gather(*jobs, return_exceptions=True)
        refused = [r for r in results if isinstance(r, OverloadedError)]
        assert refused
        assert refused[0].retry_after == 1.0
        assert len(refused) < 5
        assert engine.open_requests == 0
        assert len((await collect(engine, request("z", [5, 6]))).tokens) == 3


async def test_an_exception_while_admitting_ends_that_request_only():
    async with running() as engine:
        with pytest.raises(BifolioError, match="no empty prompt"):
            await collect(engine, request("bad", []))
        assert (await collect(engine, request("good", [9]))).tokens == [9, 2]


async def test_an_error_of_one_request_leaves_the_others_alone():
    async with running(Script(fault_id=FAULT)) as engine:
        bad, good = await asyncio.gather(
            collect(engine, request("bad", [7, 8, FAULT, 9])),
            collect(engine, request("good", [7, 8, 9])),
        )
        assert (bad.tokens, bad.finish) == ([7, 8], FinishReason.ERROR)
        assert bad.error_code is ErrorCode.CACHE_INTEGRITY
        assert good.tokens == [7, 8, 9, 2]
        await until(lambda: engine.stats.integrity_faults == 1)


async def test_several_requests_are_read_as_one_and_one_of_them_may_be_ended():
    async with running(Script(step_seconds=0.002)) as engine:
        requests = [request(name, [10, 11, 12], ignore_eos=name == "c") for name in "abc"]
        tokens, finished = {name: [] for name in "abc"}, set()
        async with contextlib.aclosing(engine.generate(*requests)) as outputs:
            async for output in outputs:
                assert output.id not in finished
                tokens[output.id] += output.tokens
                if output.finish is not None:
                    finished.add(output.id)
                if output.id == "c" and len(tokens["c"]) >= 20:
                    engine.abort("c")
                    finished.add("c")
        assert tokens["a"] == tokens["b"] == [10, 11, 12, 2]
        assert len(tokens["c"]) >= 20
        assert engine.open_requests == 0
        await until(lambda: engine.stats.running == 0)


async def test_the_refusal_of_one_request_ends_those_submitted_with_it():
    async with running(Script(max_model_len=32, step_seconds=0.01)) as engine:
        with pytest.raises(RequestError):  # before any news, so that a reader can still be told so
            await anext(engine.generate(request("a", [5]), request("b", [5] * 40)))
        assert engine.open_requests == 0
        await until(lambda: engine.stats.running + engine.stats.waiting == 0)


async def test_requests_that_wait_in_line_are_said_to_be_admitted():
    async with running(Script(step_seconds=0.01), max_num_seqs=1) as engine:
        endless = engine.generate(request("a", [5], ignore_eos=True))
        waiting = engine.generate(request("b", [6]), request("c", [7]))
        async with contextlib.aclosing(endless), contextlib.aclosing(waiting):
            await anext(endless)
            assert [await anext(waiting), await anext(waiting)] == [Output(id="b"), Output(id="c")]
            await until(lambda: (engine.stats.running, engine.stats.waiting) == (1, 2))


async def test_all_requests_can_be_ended_with_a_reason():
    async with running(Script(step_seconds=0.01)) as engine:
        jobs = [
            asyncio.create_task(collect(engine, request(str(i), [5], ignore_eos=True)))
            for i in range(3)
        ]
        await until(lambda: engine.stats.running == 3)
        engine.abort_all("closing time")
        results = await asyncio.gather(*jobs, return_exceptions=True)
        assert {str(result) for result in results} == {"closing time"}
        await until(lambda: engine.stats.running == 0)


async def test_leaving_a_request_frees_its_pages_within_a_step():
    async with running(Script(step_seconds=0.005, **LASTING)) as engine:
        endless = request("a", [5, 6], ignore_eos=True)
        async with contextlib.aclosing(engine.generate(endless)) as outputs:
            async for _ in outputs:
                await until(lambda: engine.stats.live_pages > 0)
                break
        assert engine.open_requests == 0
        await until(lambda: engine.stats.running == 0 and engine.stats.live_pages == 0)


async def test_cancels_at_random_awaits_leave_nothing_behind():
    async with running(Script(step_seconds=0.0005, **LASTING), max_num_seqs=16) as engine:
        rng = random.Random(2)
        chances = [(rng.randrange(1, 30), rng.random() * 0.05) for _ in range(400)]

        async def one(i):
            length, moment = chances[i]
            req = request(str(i), [5] * length, ignore_eos=bool(i % 2))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(collect(engine, req), moment)

        for start in range(0, 400, 50):
            await asyncio.gather(*(one(start + i) for i in range(50)))
        assert engine.open_requests == 0
        await until(lambda: engine.stats.running + engine.stats.waiting == 0)
        assert engine.stats.free_pages == Script().pages


async def test_no_abort_is_sent_for_a_finished_request(monkeypatch):
    async with running() as engine:
        sent = []
        send = engine._send
        monkeypatch.setattr(engine, "_send", lambda m: (sent.append(type(m).__name__), send(m)))
        await collect(engine, request("a", [5, 6, 7]))
        assert sent == ["Submit"]


async def test_a_process_that_is_killed_while_it_loads_is_told_with_the_cure():
    """As the system does where memory runs out."""
    with pytest.raises(EngineDeadError, match=r"killed.*memory.*--plan.*--experts mapped"):
        async with running(Script(load_killed=True)):
            pass


async def test_killing_the_process_fails_every_open_request():
    async with running(Script(step_seconds=0.01, **LASTING)) as engine:
        jobs = [
            asyncio.create_task(collect(engine, request(str(i), [5], ignore_eos=True)))
            for i in range(20)
        ]
        await until(lambda: engine.stats.running == 20)
        os.kill(engine.pid, signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), PATIENCE)
        assert all(isinstance(r, EngineDeadError) for r in results)
        with pytest.raises(EngineDeadError):
            engine.check_health()
        with pytest.raises(EngineDeadError):
            await collect(engine, request("late", [5]))
        assert engine.open_requests == 0


@pytest.mark.parametrize(("accident", "words"), [(RAISE, "script says raise"), (KILL, "ended")])
async def test_a_crash_in_a_step_says_why(accident, words, capfd):
    async with running(Script(raise_id=RAISE, kill_id=KILL)) as engine:
        with pytest.raises(EngineDeadError, match=words):
            await collect(engine, request("a", [7, accident]))


async def test_a_stopped_process_is_unhealthy_until_it_goes_on():
    async with running(beat_timeout=0.6) as engine:
        os.kill(engine.pid, signal.SIGSTOP)
        await until(lambda: not is_healthy(engine))
        os.kill(engine.pid, signal.SIGCONT)
        await until(lambda: is_healthy(engine))
        assert (await collect(engine, request("a", [9]))).tokens == [9, 2]


async def test_a_hung_step_is_unhealthy_and_idleness_is_not():
    async with running(Script(hang_id=HANG, hang_seconds=3.0), beat_timeout=0.6) as engine:
        await asyncio.sleep(0.7)  # longer than an engine may be silent
        await until(lambda: is_healthy(engine))  # on a busy machine one heartbeat may be late
        job = asyncio.create_task(collect(engine, request("a", [HANG])))
        await until(lambda: not is_healthy(engine))
        await job
        await until(lambda: is_healthy(engine))


async def test_a_long_step_that_comes_along_is_healthy_and_ready(monkeypatch):
    """Its heartbeats, each with progress, are what counts: how late they come says the machine."""
    async with running(Script(long_id=HANG, long_seconds=1.5)) as engine:
        beats, on_beat = [], engine._on_beat
        monkeypatch.setattr(engine, "_on_beat", lambda stats: (beats.append(stats), on_beat(stats)))
        job = asyncio.create_task(collect(engine, request("a", [HANG])))
        while not job.done():
            await asyncio.sleep(0.05)
            assert is_healthy(engine)
        assert (await job).tokens == [HANG, 2]
        assert len({stats.progress for stats in beats}) >= 4


async def test_work_without_progress_is_not_ready():
    async with running(stall_timeout=0.4) as engine:
        from bifolio.stats import EngineStats

        engine._on_beat(EngineStats(computed_tokens=5, running=0, waiting=0))
        engine.check_ready()
        engine._progress_at -= 1.0
        engine._on_beat(EngineStats(computed_tokens=5, running=0, waiting=3))
        engine.check_health()
        with pytest.raises(EngineDeadError, match=r"no progress .* 3 waiting"):
            engine.check_ready()
        engine._on_beat(EngineStats(computed_tokens=6, running=1, waiting=2))
        engine.check_ready()


async def test_an_error_of_the_load_keeps_its_class(capfd):
    with pytest.raises(CheckpointError, match="tensor 7 is missing"):
        async with running(Script(load_error="tensor 7 is missing")):
            pass
    assert capfd.readouterr().err == ""  # no traceback for what is said on purpose


def never_ready(config, progress):
    """A factory for a load that takes for ever."""
    progress("forever", 0, 1)
    time.sleep(3600)


async def test_a_start_that_is_cancelled_ends_the_process_at_once(monkeypatch):
    monkeypatch.setattr("bifolio.process.client._CLOSE_SECONDS", 2 * PATIENCE)
    news = asyncio.Event()
    engine = AsyncEngine(
        scripted_config(Script()),
        factory=f"{__name__}:never_ready",
        on_loading=lambda _: news.set(),
    )
    starting = asyncio.create_task(engine.start())
    await news.wait()
    began = time.monotonic()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert time.monotonic() - began < PATIENCE  # killed; a request to close gets more time
    with pytest.raises(ProcessLookupError):
        os.kill(engine.pid, 0)


async def test_a_factory_that_cannot_be_imported_is_a_clear_error(capfd):
    engine = AsyncEngine(scripted_config(Script()), factory="bifolio.nowhere:create")
    with pytest.raises(EngineDeadError, match="nowhere"):
        await engine.start()


async def test_stop_ends_the_process_and_open_requests():
    async with running(Script(step_seconds=0.01)) as engine:
        job = asyncio.create_task(collect(engine, request("a", [5], ignore_eos=True)))
        await until(lambda: engine.stats.running == 1)
        pid = engine.pid
    with pytest.raises(EngineDeadError):
        await job
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_signals_for_the_group_are_left_to_the_parent():
    async with running() as engine:
        os.kill(engine.pid, signal.SIGINT)
        os.kill(engine.pid, signal.SIGTERM)
        os.kill(engine.pid, signal.SIGHUP)
        assert (await collect(engine, request("a", [9]))).tokens == [9, 2]


@pytest.mark.parametrize("hang", [False, True])
def test_the_process_ends_with_its_parent(hang):
    program = textwrap.dedent(
        f"""
        import asyncio, sys
        import bifolio.process.worker
        from bifolio.process.client import AsyncEngine
        from bifolio.request import Request, SamplingParams
        from support.scripted_engine import FACTORY, Script, scripted_config

        async def main():
            script = Script(hang_id=9, step_seconds=0.001)
            engine = AsyncEngine(scripted_config(script), factory=FACTORY)
            await engine.start()
            prompt = [9 if {hang} else 8]
            sampling = SamplingParams(max_tokens=10**6, ignore_eos=True, temperature=0.0)
            print(engine.pid, flush=True)
            async for _ in engine.generate(Request(id="a", prompt_ids=prompt, sampling=sampling)):
                pass
        asyncio.run(main())
        """
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=env) as top:
        pid = int(top.stdout.readline())
        time.sleep(0.3)
        top.kill()
    deadline = time.monotonic() + PATIENCE
    while alive(pid):
        assert time.monotonic() < deadline, "the engine process outlived its parent"
        time.sleep(0.05)


def process_fields(pid):
    """Fields of /proc/PID/stat behind the name, from the state on; none when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except FileNotFoundError:
        return None


def alive(pid):
    fields = process_fields(pid)
    return fields is not None and fields[0] not in "ZX"


async def test_an_idle_engine_takes_next_to_no_processor_time():
    async with running() as engine:
        first = engine.stats
        await until(lambda: engine.stats is not first)  # now it is done with its start
        before = cpu_seconds(engine.pid)
        await asyncio.sleep(1.5)
        assert cpu_seconds(engine.pid) - before <= 0.03


def cpu_seconds(pid):
    fields = process_fields(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
