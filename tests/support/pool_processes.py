"""Real worker processes of two pools over a tiny model, behind the router and the API."""

import contextlib
import itertools
import os
import signal
from pathlib import Path

from bifolio.config import EngineConfig, ServerConfig
from bifolio.disagg.fleet import Fleet
from bifolio.disagg.router import PoolRouter
from bifolio.formats import PrecisionPlan
from bifolio.text.tokenizer_files import load_text_side
from support.e2e_harness import serving_client, until

PLAN = ("fp8/bf16", "int4:g32/fp8")


def config(model, side, **limits):
    fields = {"cache_memory": 2**20, "max_model_len": 512, "threads": 1, "max_step_tokens": 32}
    return EngineConfig(model=model, plan=PrecisionPlan.parse(side), **(fields | limits))


@contextlib.asynccontextmanager
async def pools(
    model, prefill=1, decode=1, *, plan=PLAN, transport="shm", tls=None, on_loss="recompute"
):
    """A server over so many workers; `running.engine` is the router."""
    fleet = Fleet(
        [config(model, plan[0])] * prefill,
        [config(model, plan[1])] * decode,
        transport=transport,
        tls=tls,
    )
    router = PoolRouter(fleet, on_loss=on_loss)
    await router.start()
    try:
        everyone = [(p, d) for p, d in itertools.product(fleet.prefill, fleet.decode)]
        await until(lambda: all(d.name in p.peers for p, d in everyone), 300)
        settings = ServerConfig(engine=config(model, plan[0]), served_name="m")
        async with serving_client(router, settings, load_text_side(Path(model))) as running:
            yield running
    finally:
        await router.stop()


def kill(router, name, number=signal.SIGKILL):
    """Send a signal to the process of a worker."""
    os.kill(router.fleet.member(name).engine.pid, number)


async def until_whole(router, restarts, seconds=300.0):
    """Wait until every worker is up, connected, and so many have been replaced."""

    def whole():
        fleet = router.fleet
        pairs = itertools.product(fleet.prefill, fleet.decode)
        replaced = sum(member.restarts for member in fleet.members)
        up = all(member.up for member in fleet.members)
        return replaced >= restarts and up and all(d.name in p.peers for p, d in pairs)

    await until(whole, seconds)


async def until_accounted(router, seconds=120.0):
    """Every page of every worker is free or cached, and no transfer is open."""

    def accounted():
        for member in router.fleet.members:
            stats, handoff = member.stats, member.stats.handoff
            if (
                handoff is None
                or stats.free_pages + stats.cached_pages != member.engine.hello.pages
            ):
                return False
            if (stats.running, stats.waiting, handoff.open, stats.holds) != (0, 0, 0, 0):
                return False
        return True

    await until(accounted, seconds)
