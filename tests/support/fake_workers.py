"""Workers without processes: a test says, attempt by attempt, what a pair does with a request."""

import asyncio
import contextlib

from bifolio.config import EngineConfig
from bifolio.disagg.fleet import Fleet
from bifolio.disagg.router import PoolRouter
from bifolio.engine.messages import EngineInfo
from bifolio.errors import EngineDeadError, OverloadedError
from bifolio.request import ErrorCode, FinishReason, Output, Request, SamplingParams
from bifolio.stats import EngineStats

HELLO = EngineInfo(
    model="m",
    vocab=100,
    max_model_len=256,
    stop_ids=(),
    page_size=16,
    pages=64,
    page_bytes=1024,
    plan="p",
    kernels="k",
    boot_epoch=1,
)

REFUSED = 99
"""First token of a prompt that no worker admits."""

HANDOFF = Output(id="", finish=FinishReason.HANDOFF)
LOST_PAGES = Output(id="", finish=FinishReason.ERROR, error_code=ErrorCode.PAGES_LOST, error="gone")
FAILED = Output(id="", finish=FinishReason.ERROR, error_code=ErrorCode.HANDOFF_FAILED, error="why")
DEAD = EngineDeadError("killed")


def tokens(*ids, end=None):
    return Output(id="", tokens=list(ids), finish=end)


class FakeEngine:
    """Says what `script` yields for a request: outputs, errors to raise, events to wait for."""

    def __init__(self, script):
        self.hello = HELLO
        self.stats = EngineStats(free_pages=64)
        self.is_dead = False
        self.closed = 0
        self.requests = []
        self._script = script

    def check_health(self):
        if self.is_dead:
            raise DEAD

    check_ready = check_health

    def generate(self, request):
        self.requests.append(request)
        return self._admit(request)

    async def _admit(self, request):
        if request.prompt_ids[0] == REFUSED:
            raise OverloadedError("full", 1.0)
        yield Output(id=request.id)
        async with contextlib.aclosing(self._say(request.id, request)) as outputs:
            async for output in outputs:
                yield output

    def follow(self, request_id):
        return self._say(request_id, None)

    async def _say(self, request_id, request):
        try:
            for item in self._script(request_id, request):
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, float):
                    await asyncio.sleep(item)
                    continue
                if isinstance(item, asyncio.Event):
                    await item.wait()
                    continue
                await asyncio.sleep(0)
                yield Output(
                    id=request_id,
                    tokens=list(item.tokens),
                    finish=item.finish,
                    error=item.error,
                    error_code=item.error_code,
                    prompt_logprobs=item.prompt_logprobs,
                )
            await asyncio.sleep(3600)
        finally:
            self.closed += 1


def router_over(prefill, decode, **options):
    """A router over workers with these scripts; all are connected."""
    config = EngineConfig(model="m")
    fleet = Fleet([config] * len(prefill), [config] * len(decode))
    for member, script in zip(fleet.members, [*prefill, *decode], strict=True):
        member.engine = FakeEngine(script)
    for member in fleet.prefill:
        member.peers = {other.name for other in fleet.decode}
    router = PoolRouter(fleet, **options)
    router._hello = HELLO
    return router


def ask(name="a", length=4, session="", salt="", start=1, timeout=None):
    prompt = list(range(start, start + length))
    sampling = SamplingParams(max_tokens=16)
    return Request(
        id=name,
        prompt_ids=prompt,
        sampling=sampling,
        session=session,
        cache_salt=salt,
        timeout=timeout,
    )


async def answer(router, *requests):
    """Tokens and last output of each request."""
    found, last = {request.id: [] for request in requests}, {}
    async for output in router.generate(*requests):
        found[output.id] += output.tokens
        last[output.id] = output
    return found, last
