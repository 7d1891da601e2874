"""A client of the chat API: reads server-sent events by hand and takes the times on the way."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Self

import httpx

from bifolio.errors import (
    BifolioError,
    ConfigError,
    EngineDeadError,
    IntegrityError,
    OverloadedError,
    RequestError,
)
from bifolio.lab.bench.load_client import address_of, bearer
from bifolio.request import ErrorCode

Message = dict[str, str]
"""`role` and `content`, as the chat completions API spells them."""

LOOPBACK = ("127.0.0.1", "::1", "localhost")
CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 600.0
"""Longest wait for the next byte: a long prompt on a busy server takes its time."""


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One answer and its figures. A figure that the server did not report is None.

    Times are seconds as seen by the client. `time_to_first_token` runs from sending the request
    to the first text; `tokens_per_second` is the pace after it, (completion_tokens - 1) / (last
    chunk - first text). Tokens are the server's count, never a count of chunks.
    """

    text: str
    model: str
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    pages_checked: int | None
    workers: list[str] | None
    time_to_first_token: float | None
    tokens_per_second: float | None
    seconds: float
    interrupted: bool = False


def events(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the data of each server-sent event in a byte stream cut anywhere.

    Lines end in LF or CRLF only, as JSON may hold U+2028 and U+2029 unescaped.
    """
    data: list[str] = []
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            text = line.removesuffix(b"\r").decode()
            if text.startswith("data:"):
                data.append(text[5:].removeprefix(" "))
            elif not text and data:
                yield "\n".join(data)
                data.clear()


class ChatClient:
    """Speaks to one server. `url` is its root or its `/v1`; close it, or use `with`."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        address = address_of(url)
        self.url = address.geturl()
        self._clock = clock
        self._http = httpx.Client(
            base_url=self.url,
            headers={b"Authorization": bearer(api_key)} if api_key else {},
            timeout=httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS),
            transport=transport,
            trust_env=address.hostname not in LOOPBACK,  # no proxy on the way to ourselves
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def first_model(self) -> str:
        """Name of the first model that the server lists."""
        try:
            response = self._http.get("/v1/models")
            if response.is_error:
                raise _failure(response)
            return str(response.json()["data"][0]["id"])
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"{self.url} does not list a model at /v1/models") from error

    def ask(
        self,
        model: str,
        messages: list[Message],
        on_text: Callable[[str], None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> ChatAnswer:
        """Stream one answer, handing each piece of text to `on_text`.

        Ctrl-C closes the connection, which stops the server's work, and returns what has come.
        """
        body = {
            "model": model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | (options or {})
        answer = _Reading(model, self._clock)
        try:
            with (
                noticed_interrupts() as check_interrupt,
                self._http.stream("POST", "/v1/chat/completions", json=body) as response,
            ):
                if response.is_error:
                    response.read()
                    raise _failure(response)
                for event in events(response.iter_bytes()):
                    check_interrupt()
                    if event == "[DONE]":
                        break
                    text = answer.take(event)
                    if text and on_text is not None:
                        on_text(text)
        except httpx.ConnectError as error:
            raise self._unreachable(error) from error
        except httpx.HTTPError as error:
            raise EngineDeadError(f"the connection to {self.url} broke: {error}") from error
        except KeyboardInterrupt:
            return answer.result(interrupted=True)
        if answer.finish_reason is None:
            raise EngineDeadError(f"{self.url} ended its stream before the answer did")
        return answer.result()

    def _unreachable(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"no server answers at {self.url} ({error}); start one with `bifolio serve`, "
            "or leave --url out to have one started"
        )


class _Reading:
    """An answer while it arrives."""

    def __init__(self, model: str, clock: Callable[[], float]) -> None:
        self.finish_reason: str | None = None
        self._model = model
        self._clock = clock
        self._start = clock()
        self._first: float | None = None
        self._last: float | None = None
        self._pieces: list[str] = []
        self._usage: dict[str, Any] = {}

    def take(self, event: str) -> str:
        """Read one chunk and return its text; raises the error that it may carry."""
        try:
            chunk = json.loads(event)
            if chunk.get("error"):
                raise _error_of(chunk["error"], status=None)
            self._model = chunk.get("model") or self._model
            self._usage = chunk.get("usage") or self._usage
            text = ""
            choices = chunk.get("choices") or ()
            for choice in choices:
                text += (choice.get("delta") or {}).get("content") or ""
                self.finish_reason = choice.get("finish_reason") or self.finish_reason
        except (ValueError, AttributeError, TypeError) as error:
            raise EngineDeadError(f"cannot read a chunk of the stream: {event[:200]!r}") from error
        if choices:
            self._last = self._clock()
        if text:
            self._first = self._first if self._first is not None else self._last
            self._pieces.append(text)
        return text

    def result(self, *, interrupted: bool = False) -> ChatAnswer:
        tokens = self._usage.get("completion_tokens")
        pace = first = None
        if self._first is not None and self._last is not None:
            first = self._first - self._start
            if tokens and tokens > 1 and self._last > self._first:
                pace = (tokens - 1) / (self._last - self._first)
        return ChatAnswer(
            text="".join(self._pieces),
            model=self._model,
            finish_reason=self.finish_reason,
            prompt_tokens=self._usage.get("prompt_tokens"),
            completion_tokens=tokens,
            cached_tokens=(self._usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            pages_checked=self._usage.get("pages_checked"),
            workers=self._usage.get("workers"),
            time_to_first_token=first,
            tokens_per_second=pace,
            seconds=self._clock() - self._start,
            interrupted=interrupted,
        )


def _failure(response: httpx.Response) -> BifolioError:
    """The error of the tree that a refused request means."""
    try:
        error = response.json()["error"]
    except (ValueError, LookupError, TypeError):
        error = f"HTTP {response.status_code} {response.reason_phrase}"
    failure = _error_of(error, response.status_code)
    if response.status_code == httpx.codes.TOO_MANY_REQUESTS:
        wait = response.headers.get("retry-after", "")
        seconds = float(wait) if wait.isdigit() else 1.0
        return OverloadedError(f"{failure} (try again in {seconds:.0f} s)", seconds)
    return failure


def _error_of(error: Any, status: int | None) -> BifolioError:
    if not isinstance(error, dict):
        error = {"message": error}
    text = str(error.get("message") or error)
    if error.get("code") == ErrorCode.CACHE_INTEGRITY:
        return IntegrityError(text)
    match status:
        case 401 | 403:
            return ConfigError(f"{text} (give the key with --api-key or BIFOLIO_API_KEY)")
        case None | 500 | 502 | 503 | 504:
            return EngineDeadError(text)
        case _:
            return RequestError(text, param=error.get("param"), code=error.get("code"))


@contextmanager
def noticed_interrupts() -> Iterator[Callable[[], None]]:
    """Within the block, Ctrl-C raises KeyboardInterrupt as ever; the function that is given
    raises it again if it was lost.

    Python drops an exception that a signal raises inside a finaliser or a callback of the garbage
    collector. Whoever calls the function between two pieces of work notices all the same. Signals
    reach the main thread only; elsewhere the function does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    seen = False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal seen
        seen = True
        raise KeyboardInterrupt

    def check() -> None:
        if seen:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
