"""What /metrics shows of the workers behind a router: their pools, their queues, their hand-offs.

Every figure carries the worker it is about, so that a restarted worker restarts its counters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from bifolio.process.client import EngineClient, WorkerView
from bifolio.stats import HandoffStats, engine_metrics

_STATES = ("free", "cached", "live", "quarantined")
_LABELS = ("worker", "pool")

_SENT = {
    "bytes": ("nbytes", "Bytes of page records that prefill workers have sent"),
    "exposed_seconds": (
        "exposed_seconds",
        "Time from the end of a prompt to the admission of its request by a decode worker",
    ),
    "encode_seconds": ("encode_seconds", "Time spent on checking, converting, digesting pages"),
}
_BOTH = {
    "open": ("open", "Requests between the pools, as prefill and decode workers count them"),
    "peers": ("peers", "Workers of the other pool that this one is connected to"),
}


def collect_workers(engine: EngineClient) -> Iterator[Metric]:
    """Metrics of all workers; nothing for one engine alone."""
    views = engine.workers()
    if not views:
        return
    yield from _states(views)
    yield from _handoffs(views)
    resent = CounterMetricFamily(
        "bifolio_requests_resent", "Requests sent through the pools again", labels=["cause"]
    )
    for cause, count in engine.resent.items():
        resent.add_metric([cause], count)
    yield resent


def _states(views: Sequence[WorkerView]) -> Iterator[Metric]:
    up = GaugeMetricFamily("bifolio_worker_up", "Whether a worker serves", labels=_LABELS)
    restarts = CounterMetricFamily(
        "bifolio_worker_restarts", "Processes that were replaced", labels=_LABELS
    )
    requests = GaugeMetricFamily(
        "bifolio_worker_requests", "Requests by worker and state", labels=[*_LABELS, "state"]
    )
    pages = GaugeMetricFamily(
        "bifolio_worker_pages", "Cache pages by worker and state", labels=[*_LABELS, "state"]
    )
    for view in views:
        labels = [view.name, view.pool]
        up.add_metric(labels, view.up)
        restarts.add_metric(labels, view.restarts)
        for state in ("running", "waiting"):
            requests.add_metric([*labels, state], getattr(view.stats, state))
        for state in _STATES:
            pages.add_metric([*labels, state], getattr(view.stats, f"{state}_pages"))
    yield from (up, restarts, requests, pages)


def _handoffs(views: Sequence[WorkerView]) -> Iterator[Metric]:
    known = [(v, v.stats.handoff) for v in views if v.stats.handoff is not None]
    senders = [(v.name, handoff) for v, handoff in known if v.pool == "prefill"]
    total = CounterMetricFamily(
        "bifolio_handoffs", "Hand-offs by prefill worker and result", labels=["worker", "result"]
    )
    failures = CounterMetricFamily(
        "bifolio_handoff_failures",
        "Hand-offs that did not happen, by prefill worker and cause",
        labels=["worker", "cause"],
    )
    pages = CounterMetricFamily(
        "bifolio_handoff_pages",
        "Pages handed over: sent while their prompt was computed (hidden) or after (exposed), or "
        "known to the decode worker",
        labels=["worker", "kind"],
    )
    hidden = GaugeMetricFamily(
        "bifolio_handoff_hidden_ratio",
        "Share of the pages sent that left while their prompt was computed",
        labels=["worker"],
    )
    for name, handoff in senders:
        total.add_metric([name, "delivered"], handoff.delivered)
        total.add_metric([name, "failed"], sum(handoff.failed.values()))
        for cause, count in handoff.failed.items():
            failures.add_metric([name, cause], count)
        for kind, count in _kinds(handoff):
            pages.add_metric([name, kind], count)
        hidden.add_metric([name], handoff.hidden_pages / handoff.pages if handoff.pages else 0.0)
    yield from (total, failures, pages, hidden)
    yield from _columns(known)


def _kinds(handoff: HandoffStats) -> Iterator[tuple[str, int]]:
    yield "hidden", handoff.hidden_pages
    yield "exposed", handoff.pages - handoff.hidden_pages
    yield "known", handoff.known_pages


def _columns(known: Sequence[tuple[WorkerView, HandoffStats]]) -> Iterator[Metric]:
    for name, (field, text) in _SENT.items():
        counter = CounterMetricFamily(f"bifolio_handoff_{name}", text, labels=["worker"])
        for view, handoff in known:
            if view.pool == "prefill":
                counter.add_metric([view.name], getattr(handoff, field))
        yield counter
    for name, (field, text) in _BOTH.items():
        gauge = GaugeMetricFamily(f"bifolio_handoff_{name}", text, labels=_LABELS)
        for view, handoff in known:
            gauge.add_metric([view.name, view.pool], getattr(handoff, field))
        yield gauge
    for field in ("held_pages", "reserved_pages"):
        text = next(spec.help for name, spec in engine_metrics() if name == field)
        gauge = GaugeMetricFamily(f"bifolio_handoff_{field}", text, labels=_LABELS)
        for view, _ in known:
            gauge.add_metric([view.name, view.pool], getattr(view.stats, field))
        yield gauge
    lost = CounterMetricFamily(
        "bifolio_handoff_pages_lost",
        "Requests whose pages a decode worker had to give to others",
        labels=["worker"],
    )
    for view, _ in known:
        if view.pool == "decode":
            lost.add_metric([view.name], view.stats.pages_lost)
    yield lost
