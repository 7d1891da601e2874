"""Keys are tenants: what one asked, another cannot tell."""

import pytest

from support.e2e_harness import serving

PROMPT = list(range(40, 40 + 48))


async def ask(server, key, salt=None):
    body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    body |= {"cache_salt": salt} if salt else {}
    answer = await server.http.post(
        "/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}
    )
    assert answer.status_code == 200, answer.text


@pytest.fixture
def sent(monkeypatch):
    """The requests that reach the engine's client."""
    from bifolio.process.client import AsyncEngine

    requests = []
    generate = AsyncEngine.generate

    def recording(self, *asked):
        requests.extend(asked)
        return generate(self, *asked)

    monkeypatch.setattr(AsyncEngine, "generate", recording)
    return requests


async def test_keys_have_caches_of_their_own(sent):
    async with serving(api_keys=("one", "two")) as server:
        for key, salt in (("one", None), ("two", None), ("one", None), ("one", "x"), ("two", "x")):
            await ask(server, key, salt)
    first, second, again, salted, other = (request.cache_salt for request in sent)
    assert first == again
    assert len({first, second, salted, other}) == 4
    assert not any("one" in salt or "two" in salt for salt in (first, second))


async def test_a_client_cannot_multiply_its_share_by_salts(sent):
    async with serving(api_keys=("one", "two")) as server:
        for salt in ("a", "b", None):
            await ask(server, "one", salt)
        await ask(server, "two")
    tenants = [request.tenant for request in sent]
    assert len(set(tenants[:3])) == 1
    assert tenants[3] != tenants[0]


async def test_the_operator_may_have_keys_share(sent):
    async with serving(api_keys=("one", "two"), share_prefix_cache=True) as server:
        await ask(server, "one")
        await ask(server, "two")
        await ask(server, "two", "x")
    assert [request.cache_salt for request in sent] == ["", "", "x"]
    assert sent[0].tenant != sent[1].tenant


async def test_digests_of_keys_differ_from_one_start_to_the_next(sent):
    for _ in range(2):
        async with serving(api_keys=("one",)) as server:
            await ask(server, "one")
    assert sent[0].cache_salt != sent[1].cache_salt
