"""Published figures of a large deployment, and what the same change of format did here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bifolio.errors import ConfigError
from bifolio.formats import PrecisionPlan
from bifolio.lab.bench.comparison import ALONE
from bifolio.lab.plan.published import EVEN, Published, compare_published
from bifolio.lab.report import numbers
from bifolio.lab.report.bench_part import Bench
from bifolio.lab.report.sections import Section, Table


@dataclass(frozen=True, slots=True)
class Pair:
    """Two targets of a benchmark that differ in one format only."""

    bench: Bench
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.before} → {self.after}"

    def at(self, concurrency: int | None) -> float | None:
        """Ratio of output tokens a second at one load; None where no load is given."""
        if concurrency is None:
            return None
        for comparison in self.bench["comparisons"]:
            same = (comparison["before"], comparison["after"], comparison["part"])
            if (
                same == (self.before, self.after, "")
                and comparison["load"]["concurrency"] == concurrency
            ):
                found = comparison["ratios"]["output_tokens_per_second"]
                return None if found is None else float(found["ratio"])
        return None

    def alone(self, name: str) -> float | None:
        """Ratio of speeds of a request alone, from `ttft` (prefill) or `tpot` (decode)."""
        for comparison in self.bench["comparisons"]:
            same = (comparison["before"], comparison["after"], comparison["part"])
            if same == (self.before, self.after, ALONE) and comparison["ratios"][name]:
                return 1 / float(comparison["ratios"][name]["ratio"])
        return None

    @property
    def peak(self) -> float | None:
        found = self.bench["peak_ratios"].get(self.after)
        return None if found is None else float(found["ratio"])

    @property
    def tokens(self) -> float | None:
        before, after = (
            self.bench["targets"][name].get("cache_tokens") for name in (self.before, self.after)
        )
        return after / before if before and after else None

    @property
    def full_load(self) -> int | None:
        """The concurrency of the first's peak."""
        found: int | None = self.bench["sweeps"][self.before]["peak_concurrency"]
        return found

    @property
    def most(self) -> int | None:
        """The highest concurrency that was measured."""
        loads = [p["load"]["concurrency"] for p in self.bench["points"] if p["part"] == ""]
        return max((load for load in loads if load is not None), default=None)


def pairs(benches: Sequence[Bench]) -> tuple[list[Pair], list[Pair]]:
    """Targets that differ from the first in the cache to fp8, and in the weights to int4."""
    caches, weights = [], []
    for bench in benches:
        first, *others = bench["targets"]
        for other in others:
            one, two = _formats(first), _formats(other)
            if one is None or two is None:
                continue
            if one[0] == two[0] and one[1] == "bf16" and two[1].startswith("fp8"):
                caches.append(Pair(bench, first, other))
            elif one[1] == two[1] and not one[0].startswith("int4") and two[0].startswith("int4"):
                weights.append(Pair(bench, first, other))
    return caches, weights


def _formats(name: str) -> tuple[str, str] | None:
    """Weights and cache of a plan with the same formats in both phases."""
    try:
        plan = PrecisionPlan.parse(name)
    except ConfigError:
        return None
    if plan.prefill != plan.decode:
        return None
    return str(plan.decode.weights), str(plan.decode.cache)


def section(benches: Sequence[Bench]) -> Section:
    """The published rows."""
    published = compare_published()
    caches, weights = pairs(benches)
    tables = [_changes(published, caches, weights), _capacities(published)]
    here = [f"{what}: {pair.name}" for what, found in _kinds(caches, weights) for pair in found]
    text = [
        "A hosting provider published what changes of format did to Kimi K2.6 and GLM-5.2 on "
        "8 × H200 (3 August 2026). Beside each figure stands what `bifolio plan` predicts for that "
        "system, and what the same kind of change did here, to another model on another machine: "
        "directions may be compared, sizes may not. "
        + ("Here: " + "; ".join(here) + "." if here else "Nothing here changes one format only.")
    ]
    return Section("Beside published figures", text, tables, notes=published.assumptions)


def _kinds(caches: list[Pair], weights: list[Pair]) -> Iterator[tuple[str, list[Pair]]]:
    yield "cache", caches
    yield "weights", weights


def _changes(published: Published, caches: list[Pair], weights: list[Pair]) -> Table:
    cache, weight = (found[0] if found else None for found in (caches, weights))
    even, peak, cost, one, many, prefill = published.ratios
    tokens = [row for row in published.capacity if row.unit == "tokens"][:2]
    cells: list[tuple[str, float, float, float | None, str]] = [
        (
            "cache bf16 → fp8, tokens that fit",
            tokens[1].published / tokens[0].published,
            tokens[1].predicted / tokens[0].predicted,
            cache.tokens if cache else None,
            "",
        )
    ]
    measured: list[tuple[Any, float | None, str]] = [
        (even, cache.at(cache.full_load) if cache else None, _at(cache)),
        (peak, cache.peak if cache else None, ""),
        (cost, _inverse(cache.peak) if cache else None, ""),
        (one, weight.alone("tpot") if weight else None, "alone"),
        (many, weight.at(weight.most) if weight else None, f"at {weight.most}" if weight else ""),
        (prefill, weight.alone("ttft") if weight else None, "alone"),
    ]
    cells += [(row.what, row.published, row.predicted, here, how) for row, here, how in measured]
    rows = []
    for what, was, predicted, here, how in cells:
        shown = numbers.times(here) + (f" ({how})" if how and here is not None else "")
        agrees = numbers.NONE if here is None else _agreement(was, here)
        rows.append([what, numbers.times(was), numbers.times(predicted), shown, agrees])
    headers = ["change", "published", "predicted there", "measured here", "direction"]
    return Table(headers, rows, "What a format does to speed and cost")


def _at(pair: Pair | None) -> str:
    return f"at {pair.full_load}" if pair else ""


def _inverse(value: float | None) -> float | None:
    return None if not value else 1 / value


def _agreement(published: float, here: float) -> str:
    def direction(value: float) -> int:
        return (value > 1 + EVEN) - (value < 1 - EVEN)

    return "the same" if direction(published) == direction(here) else "another"


def _capacities(published: Published) -> Table:
    rows = []
    for row in published.capacity:
        digits = ",.0f" if row.unit == "tokens" else ",.1f"
        rows.append(
            [
                row.what,
                f"{row.published:,.0f} {row.unit}",
                f"{row.predicted:{digits}} {row.unit}",
                f"{round(row.error, 3) + 0.0:+.1%}",
            ]
        )
    headers = ["capacity", "published", "computed", "distance"]
    return Table(headers, rows, "Capacity, which the planner has to meet within 3 %")


def as_dict(benches: Sequence[Bench]) -> Mapping[str, Any]:
    """For programs: the rows of the first table."""
    table = _changes(compare_published(), *pairs(benches))
    return {"headers": list(table.headers), "rows": [list(row) for row in table.rows]}
