"""The administrator's paths: nothing is said to strangers, and every error looks like the API's."""

import httpx
import pytest
from fastapi import FastAPI

from bifolio.server.admin import add_admin
from bifolio.server.app import _add_failures
from support.fake_workers import router_over


@pytest.fixture
def client():
    app = FastAPI()
    _add_failures(app)
    add_admin(app, router_over([lambda *_: ()], [lambda *_: ()]).fleet, "schlüssel")
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here")


def bearer(key):
    return {"Authorization": b"Bearer " + key}


CALLS = [
    ("GET", "/admin/workers"),
    ("POST", "/admin/workers"),
    ("POST", "/admin/workers?pool=decode"),
    ("DELETE", "/admin/workers/d0"),
    ("POST", "/admin/workers/d0/replace"),
]


@pytest.mark.parametrize(("method", "path"), CALLS)
@pytest.mark.parametrize("headers", [{}, bearer(b"schlussel"), bearer(b""), bearer(b"\xff")])
async def test_every_path_asks_for_the_key_before_anything_else(client, method, path, headers):
    answer = await client.request(method, path, headers=headers)
    assert answer.status_code == 401
    assert "administrator's key" in answer.json()["error"]["message"]


async def test_a_key_may_have_any_letters(client):
    answer = await client.post("/admin/workers", headers=bearer("schlüssel".encode()))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "pool: '' is neither prefill nor decode"
