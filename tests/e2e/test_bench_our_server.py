"""The benchmark against our own server: counts, hit rates, and a second run on the same prompts."""

import asyncio

import pytest

from bifolio.lab.bench.dialect import EndpointType
from bifolio.lab.bench.endpoint import Endpoint
from bifolio.lab.bench.figures import Goals
from bifolio.lab.bench.lengths import Lengths
from bifolio.lab.bench.load_session import LoadPoint, Plan, measure
from bifolio.lab.bench.traffic import Synthetic
from support.e2e_harness import default_script, serving

pytestmark = pytest.mark.asyncio(loop_scope="session")

VOCAB = 300
"""Ids of the scripted model beyond are commands to misbehave."""


async def run(server, seed, kind=EndpointType.COMPLETIONS, **work):
    await server.until_idle()  # so its metrics tell of all that was before

    def measured():
        target = Endpoint(server.url, vocab=VOCAB, kind=kind)
        try:
            made = Synthetic(Lengths.parse(60), Lengths.parse(9), **work)
            return measure(target, Plan(made, Goals(), seed, requests=6), LoadPoint(2), 0).figures
        finally:
            target.close()

    return await asyncio.to_thread(measured)


async def test_every_token_and_its_time_is_known(tiny):
    figures = await run(tiny, seed=1)
    assert not figures.invalid
    assert figures.real_output == figures.asked_output == 6 * 9
    assert figures.real_prompt == figures.asked_prompt == 6 * 60
    assert figures.itl is None or figures.itl.count <= 6 * 8  # none, if each came in one piece
    assert figures.hit_rate == 0.0


async def test_a_chat_is_measured_token_by_token_too():
    async with serving(default_script(step_seconds=0.01)) as server:
        figures = await run(server, seed=4, kind=EndpointType.CHAT)
    assert not figures.invalid
    assert figures.real_output == figures.asked_output == 6 * 9
    assert figures.real_prompt > figures.asked_prompt == 6 * 60  # its vocabulary has no words
    assert 0 < figures.itl.count <= 6 * 8


async def test_the_same_seed_again_finds_a_warm_cache_and_is_invalid(tiny):
    assert not (await run(tiny, seed=2)).invalid
    again = await run(tiny, seed=2)
    assert again.hit_rate > 0.5
    assert "came from the prefix cache" in again.invalid[0]
    assert not (await run(tiny, seed=3)).invalid
