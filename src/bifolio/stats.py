"""A snapshot of the scheduler, for metrics, readiness and reports."""

from __future__ import annotations

import msgspec


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges first, then counters since the start. Tokens and pages; the four page states add up.

    `query_tokens` are the prompt tokens of requests admitted for the first time, `hit_tokens`
    those of them that came from the prefix tree. `replayed_tokens` were computed a second time
    because of a preemption. `reserve_tokens` is the growth that each running request is given
    room for before another is admitted. `held_pages` are those that `holds` transfers
    to other engines keep, `reserved_pages` those set apart for `reservations` prompts on their way
    here, shared ones counted for each; `pages_lost` are adopted requests that ended for want
    of them. `late` are requests that ran into their time limits.
    """

    running: int
    waiting: int
    tenants: int
    pages: int
    free_pages: int
    cached_pages: int
    live_pages: int
    quarantined_pages: int
    held_pages: int
    holds: int
    reserved_pages: int
    reservations: int
    reserve_tokens: int
    steps: int
    computed_tokens: int
    generated_tokens: int
    query_tokens: int
    hit_tokens: int
    replayed_tokens: int
    pages_checked: int
    preemptions: int
    evictions: int
    finished: int
    aborted: int
    exhausted: int
    late: int
    adopted: int
    pages_lost: int
    integrity_faults: int
    logits_faults: int
