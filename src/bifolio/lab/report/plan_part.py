"""The sections of plans: what fits and the ceilings, with what was measured beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bifolio.lab.report import numbers
from bifolio.lab.report.bench_part import Bench, figure, points
from bifolio.lab.report.sections import Section, Table

PlanDocument = Mapping[str, Any]


def section(plans: Sequence[PlanDocument], benches: Sequence[Bench]) -> Section:
    """Capacity and ceilings of every plan."""
    tables = [_memory(plans)]
    tables += [t for plan in plans if (t := _ceilings(plan, benches)) is not None]
    text = [
        "Computed from shapes alone. Ceilings are what bandwidth and arithmetic allow, without "
        "launches, sampling and waiting, so measured speed is a part of them."
    ]
    notes = list(dict.fromkeys(line for plan in plans for line in plan.get("assumptions", ())))
    return Section("The plan", text, tables, notes=notes)


def _memory(plans: Sequence[PlanDocument]) -> Table:
    rows = [
        [
            str(plan["model"]),
            f"{plan['tp']} × {plan['device']['name']}",
            str(plan["plan"]),
            numbers.size(plan["weight_bytes_per_device"]),
            numbers.size(plan["cache_bytes_per_token"]),
            numbers.whole(plan["cache_tokens"]),
            numbers.whole(plan["requests_that_fit"]),
        ]
        for plan in plans
    ]
    headers = [
        *("model", "devices", "plan", "weights a device", "cache a token", "tokens that fit"),
        "requests that fit",
    ]
    return Table(headers, rows, names=3)


def _ceilings(plan: PlanDocument, benches: Sequence[Bench]) -> Table | None:
    """Decode ceilings; a measured TPOT beside them where the same plan was benchmarked."""
    measured = _measured(plan, benches)
    rows = []
    for speed in plan["phases"]["decode"]["ceilings"]:
        if not speed["fits"]:
            continue
        tpot = measured.get(speed["concurrency"])
        ceiling = speed["seconds_per_token"]
        rows.append(
            [
                str(speed["concurrency"]),
                numbers.whole(speed["tokens_per_second"]),
                numbers.milliseconds(ceiling),
                str(speed["bound"]),
                numbers.short(speed.get("cost_per_million")),
                numbers.milliseconds(tpot),
                numbers.percent(None if tpot is None else ceiling / tpot),
            ]
        )
    if not rows:
        return None
    headers = [
        *("at once", "ceiling, tokens/s", "ms per token", "waits for", "cost per million"),
        *("measured TPOT, ms", "of the ceiling"),
    ]
    context = plan["workload"]["mean_context_of_a_decode_step"]
    caption = f"Decode of {plan['plan']} at {context:,.0f} tokens of context"
    if not measured:
        headers, rows = headers[:-2], [row[:-2] for row in rows]
    return Table(headers, rows, caption)


def _measured(plan: PlanDocument, benches: Sequence[Bench]) -> dict[int, float]:
    """Median TPOT by concurrency, of targets that ran this very plan on this kind of workload."""
    found: dict[int, float] = {}
    for bench in benches:
        if not _alike(plan, bench):
            continue
        for target, described in bench["targets"].items():
            if plan["plan"] not in (described.get("plan"), target):
                continue
            for point in points(bench, target):
                at, tpot = point["load"]["concurrency"], figure(point, "tpot_p50")
                if at is not None and tpot is not None and not point["invalid"]:
                    found[at] = tpot
    return found


_ALIKE = 0.1
"""Relative distance of two mean lengths that are taken for the same workload."""


def _alike(plan: PlanDocument, bench: Bench) -> bool:
    """Whether a benchmark's lengths are about those that the plan is for."""
    asked = [run["tokens"] for run in bench["runs"] if run["part"] == ""]
    requests = sum(run["requests"]["succeeded"] for run in bench["runs"] if run["part"] == "")
    for mine, theirs in (
        ("mean_prompt_tokens", "prompt_asked"),
        ("mean_output_tokens", "output_asked"),
    ):
        mean = sum(tokens[theirs] for tokens in asked) / max(1, requests)
        if abs(mean / plan["workload"][mine] - 1) > _ALIKE:
            return False
    return True
