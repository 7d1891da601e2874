"""What an engine counts, from the scheduler to /metrics: each field names its metric beside it.

Adding a metric: a field here, the place that counts, a line in `docs/metrics.md`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, get_type_hints

import msgspec


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """How /metrics shows a field: as `bifolio_<name>`, with `label` if there is one.

    Fields with one name and different labels are one family.
    """

    name: str
    help: str
    counter: bool
    label: tuple[str, str] | None = None


def _gauge(name: str, text: str, **label: str) -> MetricSpec:
    return MetricSpec(name, text, counter=False, label=next(iter(label.items()), None))


def _counter(name: str, text: str) -> MetricSpec:
    return MetricSpec(name, text, counter=True)


_PAGES = "Cache pages by state"
_WEIGHTS = "Bytes of weights: kept in memory, mapped from files, and of those in memory now"


class HandoffStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Hand-offs that this engine sent or received, since the start; `open` and `peers` are gauges.

    `failed` counts by cause. `nbytes` are those of page records on the wire, failed attempts
    included; `known_pages` were not sent, since the other side had them; `hidden_pages` of those
    sent left before their prompt was computed to its end. `exposed_seconds` pass between that and
    the admission elsewhere. `encode_seconds` went into checking, converting and digesting pages.

    Shown by worker: `server.worker_metrics`.
    """

    delivered: int = 0
    failed: dict[str, int] = msgspec.field(default_factory=dict)
    open: int = 0
    peers: int = 0
    pages: int = 0
    hidden_pages: int = 0
    known_pages: int = 0
    nbytes: int = 0
    exposed_seconds: float = 0.0
    encode_seconds: float = 0.0


class EngineStats(msgspec.Struct, kw_only=True, omit_defaults=True, tag=True):
    """The heartbeat of an engine: gauges of that moment, and counters since the start.

    The scheduler counts into one of these, and fills in the gauges of the copy that `stats()`
    returns; the engine adds what it alone knows. It passes through the loop that steps, so a hung
    step stops it. Tokens and pages; the four page states add up to `pages`.

    `query_tokens` are the prompt tokens of requests admitted for the first time, `hit_tokens`
    those of them that came from the prefix tree. `replayed_tokens` were computed a second time
    because of a preemption. `reserve_tokens` is the growth that each running request is given
    room for before another is admitted. `held_pages` are those that `holds` transfers to other
    engines keep, `reserved_pages` those set apart for `reservations` prompts on their way here,
    shared ones counted for each; `pages_lost` are adopted requests that ended for want of them.
    `late` are requests that ran into their time limits. `integrity_faults` and `logits_faults` are
    requests that were ended, `seal_failures` pages whose bytes had changed, whether a request met
    them or not. `weight_bytes` are kept in memory, mapped experts are not among them.
    """

    running: Annotated[
        int, _gauge("num_requests_running", "Requests in the batch of the engine")
    ] = 0
    waiting: Annotated[
        int, _gauge("num_requests_waiting", "Requests that wait to be scheduled")
    ] = 0
    steps: Annotated[int, _counter("engine_steps", "Steps of the engine")] = 0
    query_tokens: Annotated[
        int,
        _counter("prompt_tokens", "Prompt tokens processed"),
        _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache"),
    ] = 0
    generated_tokens: Annotated[int, _counter("generation_tokens", "Tokens generated")] = 0
    preemptions: Annotated[
        int, _counter("num_preemptions", "Requests put back to be recomputed")
    ] = 0
    hit_tokens: Annotated[
        int, _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
    ] = 0
    pages_checked: Annotated[
        int, _counter("pages_checked", "Cache pages whose tags were compared")
    ] = 0
    integrity_faults: Annotated[
        int, _counter("cache_integrity_failures", "Requests that met a page not expected")
    ] = 0
    logits_faults: Annotated[
        int, _counter("logits_faults", "Requests ended by logits that were not finite numbers")
    ] = 0
    seals_checked: Annotated[
        int, _counter("page_seals_checked", "Cache pages whose bytes were digested and compared")
    ] = 0
    seal_failures: Annotated[
        int, _counter("page_seal_failures", "Cache pages whose bytes had changed since sealing")
    ] = 0
    free_pages: Annotated[int, _gauge("pages", _PAGES, state="free")] = 0
    cached_pages: Annotated[int, _gauge("pages", _PAGES, state="cached")] = 0
    live_pages: Annotated[int, _gauge("pages", _PAGES, state="live")] = 0
    quarantined_pages: Annotated[int, _gauge("pages", _PAGES, state="quarantined")] = 0
    weight_bytes: Annotated[int, _gauge("weight_bytes", _WEIGHTS, kind="memory")] = 0
    expert_bytes_mapped: Annotated[int, _gauge("weight_bytes", _WEIGHTS, kind="experts_mapped")] = 0
    expert_bytes_resident: Annotated[
        int, _gauge("weight_bytes", _WEIGHTS, kind="experts_resident")
    ] = 0
    tenants: Annotated[int, _gauge("num_tenants", "Tenants with requests in the engine")] = 0
    pages: Annotated[int, _gauge("cache_pages", "Cache pages in all states")] = 0
    held_pages: Annotated[
        int, _gauge("held_pages", "Pages of ended prompts that a transfer may still read")
    ] = 0
    holds: Annotated[int, _gauge("holds", "Transfers that hold pages of ended prompts")] = 0
    reserved_pages: Annotated[
        int, _gauge("reserved_pages", "Pages set apart for prompts on their way")
    ] = 0
    reservations: Annotated[
        int, _gauge("reservations", "Requests on their way from a prefill worker")
    ] = 0
    reserve_tokens: Annotated[
        int, _gauge("reserve_tokens", "Growth that running requests are given room for, in tokens")
    ] = 0
    computed_tokens: Annotated[
        int, _counter("computed_tokens", "Tokens computed, recomputed ones included")
    ] = 0
    replayed_tokens: Annotated[
        int, _counter("recomputed_tokens", "Tokens computed again because of a preemption")
    ] = 0
    evictions: Annotated[
        int, _counter("page_evictions", "Cached pages evicted from the prefix cache")
    ] = 0
    finished: Annotated[int, _counter("requests_finished", "Requests that ran to their end")] = 0
    aborted: Annotated[int, _counter("requests_aborted", "Requests that were aborted")] = 0
    exhausted: Annotated[
        int, _counter("requests_exhausted", "Requests ended because pages ran out")
    ] = 0
    late: Annotated[int, _counter("requests_late", "Requests that ran into a time limit")] = 0
    adopted: Annotated[
        int, _counter("requests_adopted", "Requests taken over from a prefill worker")
    ] = 0
    pages_lost: Annotated[
        int, _counter("requests_pages_lost", "Adopted requests whose pages were given to others")
    ] = 0
    heartbeats: Annotated[int, _counter("step_heartbeats", "Heartbeats sent within long steps")] = 0
    handoff: HandoffStats | None = None

    @property
    def progress(self) -> int:
        """Moves whenever any request got nearer to its end."""
        return self.computed_tokens + self.finished + self.aborted + self.heartbeats

    @property
    def page_usage(self) -> float:
        """Share of the usable pages that running requests hold, 0 … 1."""
        usable = self.free_pages + self.cached_pages + self.live_pages
        return self.live_pages / usable if usable else 0.0


def engine_metrics() -> Iterator[tuple[str, MetricSpec]]:
    """Fields of EngineStats and their metrics, in order."""
    for field, hint in get_type_hints(EngineStats, include_extras=True).items():
        for spec in getattr(hint, "__metadata__", ()):
            yield field, spec
