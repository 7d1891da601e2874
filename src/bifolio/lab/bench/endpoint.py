"""Drives a server with the OpenAI API: bifolio, vLLM, SGLang, llama.cpp, and their like."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import orjson

from bifolio.errors import ConfigError
from bifolio.lab.bench.dialect import Dialect, EndpointType, dialects
from bifolio.lab.bench.dispatch import Dispatcher, PlannedRequest
from bifolio.lab.bench.load_client import LoadClient, LoadClientError, Response
from bifolio.lab.bench.prometheus import ScrapedMetrics, read_metrics
from bifolio.lab.bench.record import FailureKind, Record, RequestFailure
from bifolio.lab.bench.stream import Stream
from bifolio.lab.bench.target import Counters, Description, Gauges, Observation, Peaks

T = TypeVar("T")

LOOK_SECONDS = 0.25
"""Between two looks at the gauges."""

_SETTLE_SECONDS = 2.5
"""Servers tell their counters with a delay: this long a last look waits for them to stand still."""

VOCAB = 30_000
"""Ids that about every vocabulary has, for servers that do not tell theirs."""

_PROBE = tuple(range(1000, 1008))
_ONE_TOKEN = 1.1
"""Tokens of a word up to which lengths are about those asked for."""


class Endpoint:
    """A running server. `known` is what is known of it from elsewhere, e.g. from its start."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        model: str | None = None,
        vocab: int | None = None,
        kind: EndpointType = EndpointType.COMPLETIONS,
        timeout: float = 600.0,
        known: Description | None = None,
    ) -> None:
        self._wire = LoadClient(url, api_key)
        self._timeout = timeout
        self._kind = kind
        self._runner = asyncio.Runner()
        try:
            self._description = self._do(self._discover(model, vocab, known))
            self._dialect, probed = self._do(self._find_dialect())
            if kind is EndpointType.CHAT:
                self._do(self._measure_template(probed))
        except BaseException:
            self.close()
            raise

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def describe(self) -> Description:
        """What the server says of itself."""
        return self._description

    def close(self) -> None:
        """Hang up."""
        self._wire.close()
        self._runner.close()

    async def _discover(
        self, model: str | None, vocab: int | None, known: Description | None
    ) -> Description:
        try:
            answer = await self._wire.get("/v1/models")
        except LoadClientError as error:
            raise ConfigError(f"{error}; start one, or leave --url out") from error
        if answer.status == 503:
            raise ConfigError(f"{self._wire.url} is not ready: {_message(answer)}")
        listed = _json(answer).get("data") or [{}]
        entry = next((e for e in listed if e.get("id") == model), listed[0])
        name = model or entry.get("id")
        if not name:
            raise ConfigError(f"{self._wire.url} lists no model at /v1/models; say --served-model")
        meta = entry.get("meta") or {}  # of llama.cpp
        metrics = await self._metrics()
        notes = () if metrics else ("no metrics at /metrics",)
        found = Description(
            kind="server",
            model=str(name),
            url=self._wire.url,
            version=await self._version(),
            vocab=vocab or meta.get("n_vocab") or VOCAB,
            max_model_len=entry.get("max_model_len") or meta.get("n_ctx"),
            cache_tokens=metrics.cache_tokens if metrics else None,
            notes=notes,
        )
        if known is None:
            return found
        return replace(known, url=found.url, version=found.version, vocab=found.vocab, notes=notes)

    async def _version(self) -> str | None:
        try:
            version = _json(await self._wire.get("/version")).get("version")
        except (LoadClientError, ConfigError):
            return None
        return None if version is None else str(version)

    async def _find_dialect(self) -> tuple[Dialect, int]:
        """Send a first request in the richest form that the server takes; its prompt's tokens."""
        refusals = []
        for dialect in dialects(self._kind):
            record, _ = await self._one(self._probe(1), dialect, time.perf_counter())
            failure = record.failure
            if failure is None:
                return dialect, record.prompt_tokens or 0
            if failure.fault is FailureKind.UNCOUNTED:
                raise ConfigError(
                    f"{self._wire.url} streams answers without usage, so their tokens cannot be "
                    "counted (chunks are no tokens); use a server that knows "
                    "stream_options.include_usage"
                )
            if failure.fault in (FailureKind.TIMEOUT, FailureKind.UNREACHABLE):
                raise ConfigError(f"{self._wire.url}: {failure.message}")
            refusals.append(failure.message)
            if failure.code is not None and failure.code not in (400, 422):
                break
        what = "a message" if self._kind is EndpointType.CHAT else "a prompt of token ids"
        raise ConfigError(
            f"{self._wire.url} does not answer POST {self._kind.path} with {what}: {refusals[-1]}"
        )

    def _probe(self, times: int) -> PlannedRequest:
        """A request for four tokens; the ids of its prompt are repeated that many times."""
        ids = _probe_ids(self._description.vocab) * times
        return PlannedRequest("probe", 0, 0, ids, 4, 0.0, [ids])

    async def _measure_template(self, probed: int) -> None:
        """How many tokens the server puts around a message: those may be shared by all prompts.

        `probed` are those of the first probe.
        """
        longer = self._probe(5)
        record, _ = await self._one(longer, self._dialect, time.perf_counter())
        if record.failure is not None or record.prompt_tokens is None:
            why = record.failure.message if record.failure else "its usage has no prompt_tokens"
            raise ConfigError(
                f"{self._wire.url} answered one message and not the next, so what its chat "
                f"template adds is not known: {why}"
            )
        words = len(longer.prompt) // 5
        per_word = (record.prompt_tokens - probed) / (4 * words)
        around = max(0, round(probed - per_word * words))
        note = f"the chat template adds about {around} tokens to a message"
        if per_word > _ONE_TOKEN:
            note += f", and a word is {per_word:.1f} tokens here"
        known = self._description
        self._description = replace(known, around=around, notes=(*known.notes, note))

    def run(self, dispatcher: Dispatcher) -> Observation:
        """Send what the dispatcher hands out, and watch the server meanwhile."""
        return self._do(self._run(dispatcher))

    async def _run(self, dispatcher: Dispatcher) -> Observation:
        metrics = await self._metrics()
        before = metrics.counters if metrics else Counters()
        peaks = Peaks()
        watch = asyncio.create_task(self._watch(peaks)) if metrics else None
        start_ns, began = time.time_ns(), time.perf_counter()
        try:
            records = await _Load(self, dispatcher, began).until_done()
        finally:
            if watch is not None:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
        after = await self._settled() if metrics else Counters()
        return Observation(
            records=records,
            start_ns=start_ns,
            seconds=max((record.end for record in records), default=0.0),
            before=before,
            after=after,
            peaks=peaks.highest,
            unsent=dispatcher.unsent,
        )

    async def answer(
        self, ask: PlannedRequest, began: float, answers: Sequence[str]
    ) -> tuple[Record, Stream]:
        """Send one request, `answers` being those of its earlier turns."""
        return await self._one(ask, self._dialect, began, answers)

    async def _one(
        self, ask: PlannedRequest, dialect: Dialect, began: float, answers: Sequence[str] = ()
    ) -> tuple[Record, Stream]:
        body = dialect.body(self._description.model, ask, answers)
        words = self._kind is EndpointType.CHAT
        record = Record(ask, start=time.perf_counter() - began, words=words)
        stream = Stream(record)

        def on_body(data: bytes) -> None:
            stream.feed(data, time.perf_counter() - began)

        try:
            async with asyncio.timeout(self._timeout):
                response = await self._wire.post(self._kind.path, body, on_body)
        except LoadClientError as error:
            fault = FailureKind.BROKEN if record.arrivals else FailureKind.UNREACHABLE
            record.failure = RequestFailure(fault, str(error))
            record.end = time.perf_counter() - began
        except TimeoutError:
            record.failure = RequestFailure(
                FailureKind.TIMEOUT, f"no end after {self._timeout:.0f} s"
            )
            record.end = time.perf_counter() - began
        else:
            if response.status != 200:
                record.failure = RequestFailure(
                    FailureKind.REFUSED, _message(response), response.status
                )
                record.end = time.perf_counter() - began
            else:
                stream.end(time.perf_counter() - began)
        return record, stream

    async def _metrics(self) -> ScrapedMetrics | None:
        try:
            async with asyncio.timeout(10):
                response = await self._wire.get("/metrics")
            if response.status != 200:
                return None
            return read_metrics(response.body.decode())
        except (LoadClientError, TimeoutError, ValueError):
            return None

    async def _watch(self, peaks: Peaks) -> None:
        while True:
            metrics = await self._metrics()
            peaks.see(metrics.gauges if metrics else Gauges())
            await asyncio.sleep(LOOK_SECONDS)

    async def _settled(self) -> Counters:
        """The counters once they stand still."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        last = await self._metrics()
        while time.monotonic() < deadline:
            await asyncio.sleep(LOOK_SECONDS)
            now = await self._metrics()
            if now is not None and last is not None and now.counters == last.counters:
                break
            last = now
        return last.counters if last else Counters()


class _Load:
    """One run: requests go out when they are due, independent of the others."""

    def __init__(self, endpoint: Endpoint, dispatcher: Dispatcher, began: float) -> None:
        self._endpoint = endpoint
        self._dispatcher = dispatcher
        self._began = began
        self._records: list[Record] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._answers: dict[int, list[str]] = {}
        """Texts of the answers so far, by session."""
        self._news = asyncio.Event()

    async def until_done(self) -> list[Record]:
        try:
            while not self._dispatcher.done:
                self._news.clear()
                for ask in self._dispatcher.due(self._now()):
                    task = asyncio.create_task(self._send(ask))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                await self._wait()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        return self._records

    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def _wait(self) -> None:
        """Until something is due, or an answer has ended."""
        at = self._dispatcher.next_at
        if at is None and self._dispatcher.done:
            return
        try:
            async with asyncio.timeout(None if at is None else max(0.0, at - self._now())):
                await self._news.wait()
        except TimeoutError:
            pass

    async def _send(self, ask: PlannedRequest) -> None:
        answers = self._answers.setdefault(ask.session, [])
        record, stream = await self._endpoint.answer(ask, self._began, answers)
        self._records.append(record)
        answers.append("".join(stream.text))
        # Where the answer's ids are not reported, as many others stand for them in later turns.
        answer = stream.ids or [ask.prompt[-1]] * (record.output_tokens or 0)
        self._dispatcher.ended(ask, self._now(), answer if record.ok else None)
        self._news.set()


def _probe_ids(vocab: int | None) -> list[int]:
    return [i if vocab is None or i < vocab else vocab - 1 - i % 8 for i in _PROBE]


def _json(response: Response) -> dict[str, Any]:
    if response.status in (401, 403):
        raise ConfigError("the server wants a key: give it with --api-key or BIFOLIO_API_KEY")
    try:
        found = orjson.loads(bytes(response.body))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _message(response: Response) -> str:
    found = _json(response) if response.status not in (401, 403) else {}
    error = found.get("error") or found.get("detail") or found.get("message")
    if isinstance(error, dict):
        error = error.get("message")
    return str(error or f"HTTP {response.status}")[:300]
