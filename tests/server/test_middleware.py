"""What requests pass before their route: ids, HEAD, pages of other origins, host names, keys."""

import asyncio
import json

import httpx
import pytest
import structlog
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse
from structlog.testing import capture_logs

from bifolio.config import EngineConfig, ServerConfig
from bifolio.server.middleware import RequestIds, add_middleware, answer_id
from bifolio.server.refusals import Refusals

JSON = {"Content-Type": "application/json"}
PAGE = "https://app.example"


class Counts:
    """Stands for the metrics."""

    def __init__(self):
        self.statuses = []
        self.reasons = []

    def answered(self, status):
        self.statuses.append(status)

    def refused(self, reason):
        self.reasons.append(reason)


def make_app(counts, **config):
    app = FastAPI(openapi_url=None)
    add_middleware(
        app, ServerConfig(engine=EngineConfig(model="m"), **config), counts, Refusals(counts)
    )

    @app.get("/health")
    async def health():
        return JSONResponse({"status": "ok"})

    @app.post("/v1/completions")
    async def complete(request: Request):
        await request.body()
        return JSONResponse(
            {"id": answer_id(request, "cmpl"), "log": structlog.contextvars.get_contextvars()}
        )

    @app.get("/v1/models")
    async def models():
        return JSONResponse({"log": structlog.contextvars.get_contextvars()})

    @app.get("/v1/broken")
    async def broken():
        raise KeyError("a mistake")

    return app


class Client:
    """Asks the application without a server; `address` is where it listens."""

    def __init__(self, address="127.0.0.1", **config):
        self.counts = Counts()
        self.app = make_app(self.counts, **config)
        self.transport = httpx.ASGITransport(self.app)
        self._address = address

    async def ask(self, method, path, headers=None, content=b"{}"):
        async def app(scope, receive, send):
            await self.app(scope | {"server": (self._address, 8000)}, receive, send)

        headers = {"Host": "localhost:8000"} | (headers or {})
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost:8000"
        ) as client:
            return await client.request(
                method, path, headers=headers, content=content if method == "POST" else None
            )


def error_of(response):
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error["message"]
    return response.status_code, error["code"]


# ── ids ──────────────────────────────────────────────────────────────────────────────────────


async def test_every_answer_has_an_id_of_its_own_that_the_log_has_too():
    client = Client(api_keys=("k",))
    key = {"Authorization": "Bearer k"}
    ids = []
    for method, path, headers, status in [
        ("GET", "/health", {}, 200),
        ("GET", "/v1/models", key, 200),
        ("GET", "/v1/models", {}, 401),
        ("GET", "/nowhere", key, 404),
        ("PUT", "/v1/models", key, 405),
        ("POST", "/v1/completions", key | {"Content-Type": "text/plain"}, 415),
        ("OPTIONS", "/v1/models", {"Origin": PAGE, "Access-Control-Request-Method": "GET"}, 400),
    ]:
        response = await client.ask(method, path, headers)
        assert response.status_code == status
        ids.append(response.headers["x-request-id"])
        if status == 200 and path == "/v1/models":
            assert response.json()["log"] == {"request_id": ids[-1]}
    assert len(set(ids)) == len(ids)
    assert all(ids)


async def test_the_id_of_a_completion_is_that_of_its_request():
    client = Client()
    response = await client.ask("POST", "/v1/completions", JSON)
    answer = response.json()
    assert answer["id"].startswith("cmpl-")
    assert answer["id"] == response.headers["x-request-id"] == answer["log"]["request_id"]


@pytest.mark.parametrize("chosen", ["a", "0f1e-2d3c", 'quo"te\\', "x" * 128])
async def test_a_client_may_choose_the_id(chosen):
    client = Client()
    response = await client.ask("POST", "/v1/completions", JSON | {"X-Request-Id": chosen})
    assert response.headers["x-request-id"] == chosen
    assert response.json() == {"id": f"cmpl-{chosen}", "log": {"request_id": chosen}}


@pytest.mark.parametrize("chosen", ["", "x" * 129, "two words", "tab\there", b"\xc3\xa4"])
async def test_an_id_that_is_long_or_not_visible_is_replaced(chosen):
    response = await Client().ask("GET", "/health", {"X-Request-Id": chosen})
    assert response.headers["x-request-id"].isalnum()
    assert len(response.headers["x-request-id"]) == 32


async def test_a_mistake_of_ours_is_an_error_with_an_id_and_a_traceback_in_the_log(caplog):
    client = Client()
    response = await client.ask("GET", "/v1/broken", {"X-Request-Id": "mine"})
    assert error_of(response) == (500, "internal_error")
    assert response.headers["x-request-id"] == "mine"
    assert "a mistake" not in response.text
    assert "a mistake" in caplog.text
    assert client.counts.statuses == [500]


async def test_requests_are_counted_once_by_status_and_those_hung_up_as_499():
    counts, sent = Counts(), []
    start = {"type": "http.response.start", "status": 200, "headers": []}
    part = {"type": "http.response.body", "body": b"part", "more_body": True}
    end = {"type": "http.response.body", "body": b""}

    async def send(message):
        sent.append(message["type"])

    async def answer(*messages, error=None, ended_with=None):
        async def app(scope, receive, send):
            for message in messages:
                await send(message)
            if ended_with is not None:
                scope["state"]["ended_with"] = ended_with
            if error is not None:
                raise error

        await RequestIds(app, counts)({"type": "http", "headers": []}, None, send)

    await answer(start, end)
    await answer(start | {"status": 404}, part, end)
    await answer()
    await answer(start, part)
    await answer(ended_with=408)
    with pytest.raises(KeyError):
        await answer(start, error=KeyError())  # the server hangs up
    with pytest.raises(asyncio.CancelledError):
        await answer(error=asyncio.CancelledError())
    assert counts.statuses == [200, 404, 499, 499, 408, 500, 499]
    assert sent.count(start["type"]) == 4


# ── HEAD ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nowhere", "/v1/completions"])
async def test_head_is_get_without_the_body(path):
    client = Client()
    whole = await client.ask("GET", path, {"X-Request-Id": "same"})
    head = await client.ask("HEAD", path, {"X-Request-Id": "same"})
    assert head.status_code == whole.status_code
    assert dict(head.headers) == dict(whole.headers)
    assert int(head.headers["content-length"]) == len(whole.content) > 0
    assert head.content == b""


async def test_head_needs_the_key_that_get_needs():
    client = Client(api_keys=("k",))
    assert (await client.ask("HEAD", "/v1/models")).status_code == 401
    assert (await client.ask("HEAD", "/health")).status_code == 200


# ── pages of other origins ───────────────────────────────────────────────────────────────────


def preflight(origin, method="POST"):
    return {
        "Origin": origin,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": "authorization,content-type,x-request-id",
    }


async def may_use(client, origin, headers=None):
    """Whether a browser lets a page of an origin send a request and read the answer."""
    asked = await client.ask("OPTIONS", "/v1/completions", preflight(origin))
    if asked.is_error:
        assert "access-control-allow-origin" not in asked.headers
        return False
    assert asked.headers["access-control-allow-origin"] in ("*", origin)
    assert "authorization" in asked.headers["access-control-allow-headers"]
    answer = await client.ask(
        "POST", "/v1/completions", JSON | {"Origin": origin} | (headers or {})
    )
    assert answer.headers["access-control-allow-origin"] in ("*", origin)
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    return answer.status_code == 200


async def test_a_preflight_that_is_refused_has_the_form_of_errors():
    client = Client(cors_origins=(PAGE,))
    for headers in (preflight("http://evil.example"), preflight(PAGE, "PUT")):
        asked = await client.ask("OPTIONS", "/v1/completions", headers)
        assert error_of(asked) == (400, "preflight_refused")
        assert asked.headers["content-type"] == "application/json"
        assert "origin" in asked.headers["vary"].lower()


LOCAL = ["http://localhost:3000", "http://127.0.0.1", "https://[::1]:8443"]
FOREIGN = [PAGE, "http://localhost.example:3000", "http://evil.localhost", "null", "file://"]
KEY = {"Authorization": "Bearer k"}


async def test_without_a_key_pages_may_not_use_the_server_unless_they_are_named():
    client = Client()
    for origin in [*LOCAL, *FOREIGN]:
        assert not await may_use(client, origin)
        sent = await client.ask("POST", "/v1/completions", JSON | {"Origin": origin})
        assert error_of(sent) == (403, "origin_not_allowed")
    client = Client(cors_origins=(PAGE, "http://localhost:3000"))
    assert [await may_use(client, origin) for origin in (PAGE, *LOCAL)] == [
        True,
        True,
        False,
        False,
    ]
    assert all([await may_use(Client(cors_origins=("*",)), origin) for origin in FOREIGN])


async def test_with_a_key_pages_of_this_machine_may_or_those_that_are_named():
    client = Client(api_keys=("k",))
    assert [await may_use(client, origin, KEY) for origin in LOCAL] == [True] * 3
    assert [await may_use(client, origin, KEY) for origin in FOREIGN] == [False] * 5
    client = Client(api_keys=("k",), cors_origins=(PAGE,))
    assert [await may_use(client, o, KEY) for o in (PAGE, LOCAL[0])] == [True, False]


async def test_a_page_needs_the_key_and_can_read_that_it_does():
    client = Client(api_keys=("k",))
    headers = JSON | {"Origin": LOCAL[0]}
    response = await client.ask("POST", "/v1/completions", headers)
    assert error_of(response) == (401, "invalid_api_key")
    assert response.headers["access-control-allow-origin"] == LOCAL[0]


async def test_pages_of_the_server_itself_are_not_foreign():
    headers = JSON | {"Origin": "http://localhost:8000", "Sec-Fetch-Site": "same-origin"}
    assert (await Client().ask("POST", "/v1/completions", headers)).status_code == 200


async def test_programs_that_send_an_origin_need_nothing_but_their_key():
    headers = JSON | KEY | {"Origin": PAGE}
    client = Client(api_keys=("k",))
    assert (await client.ask("POST", "/v1/completions", headers)).status_code == 200


# ── kinds of body ────────────────────────────────────────────────────────────────────────────

FORM = "application/x-www-form-urlencoded"
BODIES = [
    ("application/json", {}, 200),
    ("Application/JSON; charset=utf-8", {}, 200),
    ("application/vnd.api+json", {}, 200),
    (None, {}, 200),
    (FORM, {}, 200),
    ("text/plain", {}, 415),
    ("text/plain;charset=UTF-8", {}, 415),
    ("multipart/form-data; boundary=x", {}, 415),
    ("text/json", {}, 415),
    ("application/jsonp", {}, 415),
    ("text/plain; a=application/json", {}, 415),
    ("", {}, 415),
    # What a page can send without a preflight:
    (None, {"Origin": "http://localhost:8000"}, 415),
    (FORM, {"Origin": "http://localhost:8000"}, 415),
    (None, {"Sec-Fetch-Site": "cross-site"}, 415),
    (FORM, {"Sec-Fetch-Site": "cross-site"}, 415),
    ("application/json", {"Sec-Fetch-Site": "same-origin"}, 200),
]


@pytest.mark.parametrize(("kind", "headers", "status"), BODIES)
async def test_bodies_are_json_and_said_to_be_where_a_page_may_have_sent_them(
    kind, headers, status
):
    client = Client()
    kinds = {} if kind is None else {"Content-Type": kind}
    response = await client.ask("POST", "/v1/completions", kinds | headers)
    assert response.status_code == status
    if status == 415:
        assert error_of(response)[1] == "unsupported_media_type"
        assert "hint: send the header Content-Type: application/json" in response.text


async def test_two_kinds_of_body_are_not_taken_for_the_first():
    client = Client()
    headers = [*JSON.items(), ("Content-Type", "text/plain"), ("Host", "localhost")]
    async with httpx.AsyncClient(transport=client.transport, base_url="http://localhost") as http:
        response = await http.post("/v1/completions", headers=headers, content=b"{}")
    assert response.status_code == 415


# ── host names ───────────────────────────────────────────────────────────────────────────────

OURS = ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1:8000", "[::1]:8000", "192.0.2.7"]
OTHERS = ["evil.example", "evil.example:8000", "localhost.evil.example", "x", "127.0.0.1.evil", ""]


async def hosts_admitted(hosts, **options):
    client, admitted = Client(**options), []
    for host in hosts:
        for method, path in [("GET", "/v1/models"), ("HEAD", "/health"), ("OPTIONS", "/x")]:
            response = await client.ask(method, path, {"Host": host, "Authorization": "Bearer k"})
            refused = response.status_code == 421
            if refused and method != "HEAD":
                assert error_of(response) == (421, "host_not_allowed")
                assert "--allowed-host" in response.text
        admitted += [] if refused else [host]
    assert client.counts.reasons == ["host_not_allowed"] * 3 * (len(hosts) - len(admitted))
    return admitted


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.8.8", "::1"])
async def test_names_of_others_do_not_lead_to_a_keyless_server_of_this_machine(address):
    assert await hosts_admitted(OURS, address=address) == OURS
    assert await hosts_admitted(OTHERS, address=address) == []
    named = await hosts_admitted(["Box.lan:80", "evil.example"], allowed_hosts=("box.lan",))
    assert named == ["Box.lan:80"]
    assert await hosts_admitted(["my-machine:80"], host="My-Machine") == ["my-machine:80"]


async def test_names_are_not_checked_with_a_key_nor_on_other_addresses_unless_some_are_given():
    assert await hosts_admitted(OTHERS, api_keys=("k",)) == OTHERS
    assert await hosts_admitted(OTHERS, address="192.0.2.7", host="192.0.2.7") == OTHERS
    assert await hosts_admitted(OTHERS, host="0.0.0.0") == OTHERS
    assert await hosts_admitted(OTHERS, allowed_hosts=("*",)) == OTHERS
    options = {"api_keys": ("k",), "allowed_hosts": ("api.example",)}
    assert await hosts_admitted(["api.example", "evil.example"], **options) == ["api.example"]


async def test_a_long_host_is_cut_in_the_message():
    response = await Client().ask("GET", "/health", {"Host": "a" * 10_000})
    assert response.status_code == 421
    assert len(response.text) < 400


async def test_refusals_are_counted_and_logged_with_their_id():
    client = Client()
    with capture_logs() as logs:
        headers = {"Host": "evil.example", "X-Request-Id": "mine"}
        await client.ask("GET", "/health", headers)
        await client.ask("POST", "/v1/completions", {"Content-Type": "text/plain"})
    assert client.counts.reasons == ["host_not_allowed", "unsupported_media_type"]
    assert [line["reason"] for line in logs] == client.counts.reasons
    assert (logs[0]["request_id"], logs[0]["client"]) == ("mine", "127.0.0.1")
    assert json.dumps(logs)
