"""What /metrics shows: the engine's heartbeat as it stands, and times seen by the front end.

Names follow vLLM's with the prefix `bifolio_`. Labels take values from small fixed sets only, so
that no client can make them grow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bifolio.process.client import EngineClient
from bifolio.server.worker_metrics import collect_workers
from bifolio.stats import EngineStats, engine_metrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)


class ServerMetrics:
    """One server's metrics, in a registry of their own."""

    def __init__(self, engine: EngineClient) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From the request to its first token", _SECONDS
        )
        self.per_token = self._histogram(
            "time_per_output_token_seconds",
            "Time from the first token to the last over their number less one, per answer",
            _TOKEN_SECONDS,
        )
        self.latency = self._histogram(
            "e2e_request_latency_seconds", "From the request to its last token", _SECONDS
        )
        # Times are those of answers that ended with stop or length: what is cut short is no
        # sample of how long an answer takes.
        self._success = Counter(
            "bifolio_request_success",
            "Answers by how they ended: stop, length, or abort (their client hung up)",
            ["finished_reason"],
            registry=self._registry,
        )
        self._errors = Counter(
            "bifolio_request_errors",
            "Answers that ended with an error, or that the engine refused",
            ["code"],
            registry=self._registry,
        )
        self._http_requests = Counter(
            "bifolio_http_requests",
            "HTTP requests by status; 499: the client hung up before its answer was complete",
            ["status"],
            registry=self._registry,
        )
        self._http_refusals = Counter(
            "bifolio_http_refusals",
            "Connections and requests that the HTTP front end turned away",
            ["reason"],
            registry=self._registry,
        )

    def finished(self, reason: str) -> None:
        """Count an answer that ended with `stop`, `length`, or `abort`."""
        self._success.labels(reason).inc()

    def failed(self, code: str) -> None:
        """Count an answer that ended with an error of this code."""
        self._errors.labels(code).inc()

    def answered(self, status: int) -> None:
        """Count an HTTP request."""
        self._http_requests.labels(str(status)).inc()

    def refused(self, reason: str) -> None:
        """Count what `Refusals` turned away."""
        self._http_refusals.labels(reason).inc()

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"bifolio_{name}", help_text, buckets=buckets, registry=self._registry)


class _EngineCollector(Collector):
    """Reads the latest heartbeat when somebody asks."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        yield from _families(stats)
        hello = self._engine.hello
        yield GaugeMetricFamily(
            "bifolio_kv_cache_tokens",
            "Tokens that the cache holds at most",
            value=hello.pages * hello.page_size,
        )
        yield GaugeMetricFamily(
            "bifolio_kv_cache_usage_perc",
            "Share of the usable pages that running requests hold (1 means all)",
            value=stats.page_usage,
        )
        yield CounterMetricFamily(
            "bifolio_engine_restarts",
            "Engine processes that took the place of a dead one; its counters began again",
            value=self._engine.restarts,
        )
        yield from collect_workers(self._engine)
        yield GaugeMetricFamily(
            "bifolio_frontend_open_requests",
            "Requests that the front end holds state for",
            value=self._engine.open_requests,
        )


def _families(stats: EngineStats) -> Iterable[Metric]:
    """Every field of the heartbeat as `bifolio.stats` describes it."""
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for field, spec in engine_metrics():
        key, value = spec.label or (None, "")
        if spec.name not in families:
            kind = CounterMetricFamily if spec.counter else GaugeMetricFamily
            families[spec.name] = kind(
                f"bifolio_{spec.name}", spec.help, labels=[key] if key else []
            )
        families[spec.name].add_metric([value] if key else [], getattr(stats, field))
    return families.values()
