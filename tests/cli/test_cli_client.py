from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bifolio.cli.api_client import ChatClient, events
from bifolio.errors import (
    BifolioError,
    ConfigError,
    EngineDeadError,
    IntegrityError,
    OverloadedError,
    RequestError,
)
from bifolio.lab.bench.load_client import LoadClient, bearer
from support.fake_server import PARIS, USAGE, chunk, refusal

STREAM = "".join(f"data: {event}\n\n" for event in PARIS).encode()


class Clock:
    """Each reading is one second after the one before."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def client_of(response: httpx.Response | Exception) -> ChatClient:
    def handle(request: httpx.Request) -> httpx.Response:
        if isinstance(response, Exception):
            raise response
        return response

    return ChatClient("http://fake", transport=httpx.MockTransport(handle), clock=Clock())


def stream_of(*items: str) -> httpx.Response:
    return httpx.Response(200, content="".join(f"data: {item}\n\n" for item in items).encode())


def ask(response: httpx.Response | Exception):
    with client_of(response) as client:
        return client.ask("fake", [{"role": "user", "content": "?"}])


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=40))
def test_events_do_not_depend_on_how_the_stream_is_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[a:b] for a, b in pairwise(edges)]
    assert list(events(pieces)) == PARIS


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"data: a\r\n\r\ndata:b\n\n", ["a", "b"]),
        (b": ping\n\nevent: x\nid: 7\ndata: a\n\n", ["a"]),
        (b"data: one\ndata: two\n\n", ["one\ntwo"]),
        ("data: a\u2028b\x85c\x0b\n\n".encode(), ["a\u2028b\x85c\x0b"]),
        (b"data: never ended\n", []),
    ],
    ids=["crlf-and-no-space", "comments-and-fields", "two-lines", "unicode-lines", "cut-off"],
)
def test_events_follow_the_rules_of_server_sent_events(stream: bytes, expected: list[str]) -> None:
    assert list(events([stream])) == expected


def test_an_answer_carries_the_servers_counts_and_the_clients_times() -> None:
    pieces: list[str] = []
    with client_of(stream_of(*PARIS)) as client:
        answer = client.ask("asked", [], pieces.append)
    assert pieces == ["The capital", " is Paris."]
    assert answer.text == "The capital is Paris."
    assert (answer.model, answer.finish_reason) == ("fake", "stop")
    assert answer.prompt_tokens == USAGE["prompt_tokens"]
    assert answer.completion_tokens == 4
    assert answer.cached_tokens == 16
    assert answer.pages_checked == 12
    # Readings: 1 start, 2 role, 3 and 4 text, 5 finish, 6 end.
    assert answer.time_to_first_token == 2.0
    assert answer.tokens_per_second == pytest.approx((4 - 1) / (5 - 3))
    assert answer.seconds == 5.0
    assert not answer.interrupted


def test_figures_that_the_server_does_not_report_are_none_and_never_counted_from_chunks() -> None:
    answer = ask(stream_of(chunk("a"), chunk("b"), chunk(finish="length")))
    assert (answer.text, answer.finish_reason) == ("ab", "length")
    assert answer.completion_tokens is None
    assert answer.tokens_per_second is None
    assert answer.cached_tokens is None
    assert answer.pages_checked is None
    assert answer.time_to_first_token is not None


def test_one_token_has_no_pace() -> None:
    usage = json.dumps({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})
    assert ask(stream_of(chunk("a"), chunk(finish="stop"), usage)).tokens_per_second is None


def test_an_empty_answer_has_no_first_token() -> None:
    answer = ask(stream_of(chunk(), chunk(finish="stop")))
    assert (answer.text, answer.time_to_first_token) == ("", None)


def error_event(message: str, code: str) -> str:
    return json.dumps({"error": {"message": message, "code": code}})


@pytest.mark.parametrize(
    ("response", "kind", "words"),
    [
        (refusal(400, "too long", param="messages"), RequestError, "too long"),
        (refusal(401, "no key"), ConfigError, "--api-key"),
        (refusal(429, "queue full"), OverloadedError, "try again in 7 s"),
        (refusal(503, "engine gone"), EngineDeadError, "engine gone"),
        (refusal(500, "tag differs", code="cache_integrity"), IntegrityError, "tag differs"),
        (httpx.Response(502, text="<html>"), EngineDeadError, "HTTP 502 Bad Gateway"),
        (httpx.Response(404, json={"error": "no such model"}), RequestError, "no such model"),
        (httpx.ConnectError("refused"), ConfigError, "bifolio serve"),
        (httpx.ReadTimeout("slow"), EngineDeadError, "slow"),
        (stream_of(chunk("a"), error_event("bad page", "cache_integrity")), IntegrityError, "bad"),
        (stream_of(chunk("a"), error_event("died", "internal_error")), EngineDeadError, "died"),
        (stream_of(chunk("a")), EngineDeadError, "before the answer did"),
        (stream_of("not json"), EngineDeadError, "not json"),
        (stream_of("[1]"), EngineDeadError, "cannot read a chunk"),
    ],
)
def test_each_failure_becomes_its_error(
    response: httpx.Response | Exception, kind: type[BifolioError], words: str
) -> None:
    if not isinstance(response, httpx.Response | Exception):
        response = httpx.Response(
            response.status_code, content=response.body, headers=response.headers
        )
    with pytest.raises(kind, match=words):
        ask(response)


def test_a_refusal_keeps_the_parameter_at_fault() -> None:
    body = {"error": {"message": "m", "param": "seed", "code": "invalid_value"}}
    with pytest.raises(RequestError) as caught:
        ask(httpx.Response(400, json=body))
    assert (caught.value.param, caught.value.code) == ("seed", "invalid_value")


def test_control_c_ends_the_answer_and_keeps_what_came() -> None:
    class Interrupted(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield f"data: {chunk('so far')}\n\n".encode()
            raise KeyboardInterrupt

    answer = ask(httpx.Response(200, stream=Interrupted()))
    assert (answer.text, answer.interrupted, answer.finish_reason) == ("so far", True, None)


@pytest.mark.parametrize(
    "url", ["http://fake", "http://fake/", "http://fake/v1", "http://fake/v1/"]
)
def test_the_address_may_be_the_root_or_the_api(url: str) -> None:
    assert ChatClient(url).url == "http://fake"


@pytest.mark.parametrize(
    "url",
    [
        *("http://", "http://[::1", "http://a:x", "http://a:0", "http://a:70000", "ftp://a", "://"),
        *("http://a b", "http://a/\n", "http://\udcff", f"http://{'a' * 64}", "http://\x1b", ""),
    ],
)
def test_what_is_no_address_is_refused_and_shown_escaped_and_cut(url: str) -> None:
    for client in (ChatClient, LoadClient):
        with pytest.raises(ConfigError, match=re.escape(f"--url {url[:20]!r}"[:-1])) as raised:
            client(url)
        assert str(raised.value).isprintable()
        assert len(str(raised.value)) < 150


def test_a_key_is_sent_in_the_bytes_that_were_typed() -> None:
    assert bearer("é") == b"Bearer \xc3\xa9"
    assert bearer("\udcff") == b"Bearer \xff"
    with pytest.raises(ConfigError, match="line break"):
        bearer("a\nb")


def test_an_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        ChatClient("localhost:8000")


@pytest.mark.parametrize("body", [{"data": []}, {}, []])
def test_a_server_without_models_is_refused(body: object) -> None:
    with client_of(httpx.Response(200, json=body)) as client, pytest.raises(ConfigError):
        client.first_model()
