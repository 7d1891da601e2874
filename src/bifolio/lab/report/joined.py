"""Puts a report together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bifolio.lab.report import (
    bench_part,
    eval_part,
    method_part,
    numbers,
    plan_part,
    published_part,
)
from bifolio.lab.report.documents import Documents
from bifolio.lab.report.plots import MISSING, available, plots_of
from bifolio.lab.report.sections import ReportPage, Section, Tile

SCHEMA = "bifolio.report/1"


def bench_page(bench: Mapping[str, Any]) -> ReportPage:
    """The page of one benchmark."""
    found = Documents(benches=[dict(bench)])
    sections = [_bench_section(bench, ""), method_part.section(found)]
    method = sections[-1]
    sections[-1] = Section(method.title, method.text, method.tables, commands=method.commands)
    return ReportPage(
        title=f"Benchmark of {_models(found)}",
        subtitle=_subtitle(found),
        tiles=_speed_tiles(bench),
        sections=sections,
        alarms=bench["invalid"],
    )


def joined_page(found: Documents) -> ReportPage:
    """Everything that is known of a deployment."""
    sections = []
    for i, bench in enumerate(found.benches, 1):
        sections.append(_bench_section(bench, f"bench{i}-" if len(found.benches) > 1 else ""))
    if found.evals:
        sections.append(eval_part.section(found.evals))
    if found.plans:
        sections.append(plan_part.section(found.plans, found.benches))
    sections += [published_part.section(found.benches), method_part.section(found)]
    tiles = [tile for bench in found.benches[:1] for tile in _speed_tiles(bench)]
    return ReportPage(
        title=f"{_models(found)}: what its formats cost and bring",
        subtitle=_subtitle(found),
        tiles=[*tiles, *eval_part.tiles(found.evals)],
        sections=sections,
        alarms=[line for bench in found.benches for line in bench["invalid"]],
    )


def as_dict(found: Documents) -> dict[str, Any]:
    """The report for programs: the documents themselves, and the published rows beside them."""
    return {
        "schema": SCHEMA,
        "plans": found.plans,
        "benches": found.benches,
        "evals": found.evals,
        "published": published_part.as_dict(found.benches),
        "files": found.files,
        "missing": found.missing,
        "skipped": found.skipped,
    }


def _bench_section(bench: Mapping[str, Any], prefix: str) -> Section:
    section = bench_part.section(bench, plots_of(bench, prefix))
    if available():
        return section
    notes = [*section.notes, MISSING]
    return Section(section.title, section.text, section.tables, section.plots, notes)


def _models(found: Documents) -> str:
    names = [target["model"] for bench in found.benches for target in bench["targets"].values()]
    names += [str(plan["model"]) for plan in found.plans]
    names += [str((e.get("model") or {}).get("name")) for e in found.evals]
    return ", ".join(dict.fromkeys(name.rstrip("/").rpartition("/")[2] for name in names))


def _subtitle(found: Documents) -> str:
    for bench in found.benches:
        environment = bench["environment"]
        processor = environment["machine"].get("processor", {}).get("name", "")
        cores = environment["machine"].get("limits", {}).get("cores_allowed", "?")
        return f"{processor}, {cores} cores · {environment['created'][:10]}"
    for document in found.evals:
        return str(document.get("created", ""))[:10]
    return ""


def _speed_tiles(bench: Mapping[str, Any]) -> list[Tile]:
    """Of the cache pair if there is one, else of the last target against the first."""
    names = list(bench["targets"])
    if len(names) == 1:
        return _single_tiles(bench, names[0])
    caches, weights = published_part.pairs([bench])
    tiles: list[Tile] = []
    if caches:
        tiles += _cache_tiles(caches[0])
    for pair in weights[:1]:
        for name, what in (("tpot", "decode of one request"), ("ttft", "prefill of one prompt")):
            speed = pair.alone(name)
            if speed is not None:
                tiles.append(Tile(numbers.times(speed), what, pair.name, _tone(speed)))
    return tiles or _other_tiles(bench, names)


def _cache_tiles(pair: published_part.Pair) -> list[Tile]:
    bench, tiles = pair.bench, []
    if pair.tokens is not None:
        both = [
            numbers.whole(bench["targets"][n]["cache_tokens"]) for n in (pair.before, pair.after)
        ]
        tiles.append(Tile(numbers.times(pair.tokens), "tokens of cache", " → ".join(both), "good"))
    ends = [bench["sweeps"][n]["admission_ends_at"] for n in (pair.before, pair.after)]
    if ends[0] is not None:
        after = ends[1] if ends[1] is not None else f"more than {pair.most}"
        tiles.append(
            Tile(f"{ends[0]} → {after}", "requests at once, where admission ends", pair.name)
        )
    if pair.peak is not None:
        peak = [bench["sweeps"][n] for n in (pair.before, pair.after)]
        detail = " → ".join(
            f"{numbers.whole(p['peak_output_tokens_per_second'])} at {p['peak_concurrency']}"
            for p in peak
        )
        tiles.append(Tile(numbers.times(pair.peak), "peak throughput", detail, _tone(pair.peak)))
    even = pair.at(pair.full_load)
    if even is not None:
        cost = 1 / even
        what = f"cost of a token, both at {pair.full_load}"
        tiles.append(Tile(numbers.times(cost), what, pair.name, _tone(even)))
    return tiles


def _other_tiles(bench: Mapping[str, Any], names: Sequence[str]) -> list[Tile]:
    tiles = []
    for name in names[1:4]:
        found = bench["peak_ratios"].get(name)
        if found is not None:
            value = float(found["ratio"])
            detail = f"against {bench_part.name_of(bench, names[0])}"
            tiles.append(Tile(numbers.times(value), f"peak of {name}", detail, _tone(value)))
    return tiles


def _single_tiles(bench: Mapping[str, Any], name: str) -> list[Tile]:
    sweep = bench["sweeps"][name]
    tiles = []
    if sweep["peak_concurrency"] is not None:
        rate = numbers.whole(sweep["peak_output_tokens_per_second"])
        what = f"output tokens a second, {sweep['peak_concurrency']} at once"
        tiles.append(Tile(rate, what, bench_part.name_of(bench, name)))
        peak = next(
            p
            for p in bench_part.points(bench, name)
            if p["load"]["concurrency"] == sweep["peak_concurrency"]
        )
        cost = bench_part.figure(peak, "cost_per_million_output_tokens")
        price = f"at {bench['price_per_hour']:g} an hour"
        tiles.append(Tile(numbers.short(cost), "cost per million output tokens", price))
        first = numbers.milliseconds(bench_part.figure(peak, "ttft_p95"))
        tiles.append(Tile(f"{first} ms", "to the first token, p95", "there"))
    tokens = bench["targets"][name].get("cache_tokens")
    if tokens:
        tiles.append(Tile(numbers.whole(tokens), "tokens of cache"))
    return tiles


def _tone(speed: float) -> str:
    return "good" if speed > 1.02 else "bad" if speed < 0.98 else ""
