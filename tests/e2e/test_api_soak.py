"""Long runs over HTTP: cancelled, refused and distinct requests leak nothing; no body is a 5xx."""

import asyncio
import random
from pathlib import Path

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from support.e2e_harness import default_script, serving

pytestmark = pytest.mark.soak

ROUNDS, PER_ROUND = 10, 500


def memory_kib():
    """Memory of this process that no file backs, swapped out or not."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap"))


async def cancelled(server, i):
    body = {"model": "tiny", "prompt": f"cancelled {i}", "ignore_eos": True, "max_tokens": 400}
    try:
        job = server.post("/v1/completions", **body, stream=bool(i % 2))
        await asyncio.wait_for(job, random.random() / 20)
    except (TimeoutError, httpx.HTTPError):
        return


async def refused(server, i):
    tools = [{"type": "function", "function": {"name": f"f{i}"}}]
    body = {"messages": [{"role": "user", "content": "a"}], "tools": tools}
    assert (await server.post("/v1/chat/completions", **body)).status_code == 400


async def distinct(server, i):
    body = {"prompt": f"distinct {i}", "temperature": 0, "cache_salt": str(i % 7)}
    assert (await server.post("/v1/completions", **body)).status_code == 200


@pytest.mark.parametrize("kind", [cancelled, refused, distinct])
async def test_thousands_of_requests_leave_nothing_behind(kind):
    """Front end and test share the process, so the bound holds for both together."""
    async with serving(default_script(step_seconds=0.001)) as server:
        sizes = []
        for start in range(ROUNDS):
            numbers = range(start * PER_ROUND, (start + 1) * PER_ROUND)
            gate = asyncio.Semaphore(50)

            async def one(i, gate=gate):
                async with gate:
                    await kind(server, i)

            await asyncio.gather(*map(one, numbers))
            await server.until_idle()
            sizes.append(memory_kib())
        assert max(sizes[ROUNDS // 2 :]) - sizes[ROUNDS // 2 - 1] < 2048, sizes


def test_no_body_that_fits_the_description_is_a_5xx(tmp_path):
    """Bodies made from our own description of the API, thousands with the soak profile.

    Each answer is one that the description knows, with the type of content that it names.
    """
    loop = asyncio.new_event_loop()
    context = serving()
    server = loop.run_until_complete(context.__aenter__())
    schema = schemathesis.openapi.from_dict(
        loop.run_until_complete(server.http.get("/openapi.json")).json()
    )

    seen = set()
    for operation in schema.get_all_operations():

        @given(case=operation.ok().as_strategy())
        @settings(deadline=None, suppress_health_check=list(HealthCheck))
        def answers(case):
            arguments = case.as_transport_kwargs(base_url=server.url)
            names = ("method", "url", "headers", "params", "json", "content")
            request = {name: arguments[name] for name in names if name in arguments}
            response = loop.run_until_complete(server.http.request(**request))
            assert response.status_code < 500, (request, response.text)
            described = case.operation.definition.raw["responses"]
            assert str(response.status_code) in described, (request, response.text)
            kinds = described[str(response.status_code)]["content"]
            assert response.headers["content-type"].split(";")[0] in kinds, request
            seen.add((response.request.url.path, response.status_code))

        answers()
    # Which of them are sound is left to chance; that they were read, and refused, is not.
    assert {("/v1/completions", 400), ("/v1/chat/completions", 400), ("/tokenize", 400)} <= seen
    loop.run_until_complete(context.__aexit__(None, None, None))
    loop.close()
