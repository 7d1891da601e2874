"""Writes a run in the schema of AIPerf 0.13 (export schema 1.4), so that its tools read it.

A folder holds `profile_export_aiperf.json`, the figures, and `profile_export.jsonl`, a line for
each request. Times are milliseconds there, and `inter_token_latency` is AIPerf's own: the time
after the first token over the number of tokens less one. What AIPerf has no name for stands under
names of ours (`asked_…`, `cached_…`), which its readers allow. Our bench.json has the rest.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import bifolio
from bifolio.lab.bench.figures import Spread
from bifolio.lab.bench.load_session import Run
from bifolio.lab.bench.record import Record
from bifolio.lab.bench.target import Description

SCHEMA = "1.4"
_PRODUCER = f"bifolio-{bifolio.__version__}"


@dataclass(frozen=True, slots=True)
class _Metric:
    name: str
    unit: str
    of: Callable[[Record], float | None]


def _ms(value: float | None) -> float | None:
    return None if value is None else value * 1e3


def _mean_itl(record: Record) -> float | None:
    """AIPerf's definition."""
    if record.first is None or not record.output_tokens or record.output_tokens < 2:
        return None
    return (record.end - record.first) / (record.output_tokens - 1) * 1e3


def _user_rate(record: Record) -> float | None:
    latency = _mean_itl(record)
    return 1e3 / latency if latency else None


_METRICS = (
    _Metric("request_latency", "ms", lambda r: r.latency * 1e3),
    _Metric("time_to_first_token", "ms", lambda r: _ms(r.ttft)),
    _Metric("inter_token_latency", "ms", _mean_itl),
    _Metric("output_token_throughput_per_user", "tokens/sec/user", _user_rate),
    _Metric("output_sequence_length", "tokens", lambda r: r.output_tokens),
    _Metric("output_token_count", "tokens", lambda r: r.output_tokens),
    _Metric("input_sequence_length", "tokens", lambda r: r.prompt_tokens),
    _Metric("asked_output_tokens", "tokens", lambda r: r.ask.output),
    _Metric("asked_prompt_tokens", "tokens", lambda r: len(r.ask.prompt)),
    _Metric("cached_prompt_tokens", "tokens", lambda r: r.cached_tokens),
)


def write_run(run: Run, target: Description, folder: Path) -> None:
    """Both files of one run, into a folder that is made."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(summary(run, target), indent=2)
    (folder / "profile_export_aiperf.json").write_text(text + "\n")
    with (folder / "profile_export.jsonl").open("w") as file:
        for record in run.seen.records:
            file.write(json.dumps(_line(run, record)) + "\n")


def summary(run: Run, target: Description) -> dict[str, Any]:
    """The figures of a run."""
    records = [record for record in run.seen.records if record.ok]
    failed = [record for record in run.seen.records if not record.ok]
    figures, start = run.figures, run.seen.start_ns / 1e9
    scalars = {
        "request_throughput": ("requests/sec", figures.request_rate),
        "output_token_throughput": ("tokens/sec", figures.output_rate),
        "request_count": ("requests", float(figures.succeeded)),
        "error_request_count": ("requests", float(len(failed))),
        "benchmark_duration": ("sec", figures.seconds),
        "total_osl": ("tokens", float(figures.real_output)),
        "total_output_tokens": ("tokens", float(figures.real_output)),
        "total_isl": ("tokens", float(figures.real_prompt)),
        "goodput": ("requests/sec", figures.goodput),
        "good_request_count": ("requests", figures.good),
    }
    return {
        "schema_version": SCHEMA,
        "aiperf_version": _PRODUCER,
        "benchmark_id": f"{run.target or 'run'}-{run.label}-{run.seen.start_ns}",
        **{
            name: {"unit": unit, "avg": value}
            for name, (unit, value) in scalars.items()
            if value is not None
        },
        **_spreads(records),
        "was_cancelled": False,
        "is_complete": not figures.invalid,
        "incomplete_reason": "; ".join(figures.invalid) or None,
        "error_summary": _errors(failed),
        "start_time": _time(start),
        "end_time": _time(start + run.seen.seconds),
        "input_config": _input_config(run, target),
        "run_info": _run_info(run),
        "bifolio": {"target": target.model, "plan": target.plan, "kind": target.kind},
    }


def _spreads(records: Sequence[Record]) -> dict[str, Any]:
    found = {}
    for metric in _METRICS:
        values = [value for value in map(metric.of, records) if value is not None]
        spread = Spread.of(values)
        if spread is not None:
            found[metric.name] = {
                "unit": metric.unit,
                "avg": spread.mean,
                "min": spread.low,
                "max": spread.high,
                "std": spread.std,
                **{f"p{percent}": value for percent, value in spread.percentiles.items()},
                "count": spread.count,
                "sum": spread.total,
            }
    return found


def _run_info(run: Run) -> dict[str, Any]:
    concurrency = run.load.concurrency
    return {
        "random_seed": run.seed,
        "trial": run.repeat,
        "run_label": run.label,
        "variation_label": f"concurrency_{concurrency}" if concurrency else run.load.name,
        "variation_index": 0,
        "variation_values": {"phases.profiling.concurrency": concurrency} if concurrency else {},
    }


def _input_config(run: Run, target: Description) -> dict[str, Any] | None:
    """What of AIPerf's own configuration means this run; a replayed trace has no such thing."""
    load, figures = run.load, run.figures
    if load.concurrency is None and load.rate is None:
        return None
    arrivals: dict[str, Any] = (
        {"type": "concurrency", "concurrency": load.concurrency}
        if load.concurrency is not None
        else {"type": "poisson", "rate": load.rate}
    )
    sent = max(1, figures.succeeded)
    lengths = {
        "isl": {"mean": max(1.0, figures.asked_prompt / sent)},
        "osl": {"mean": max(1.0, figures.asked_output / sent)},
    }
    return {
        "models": {"items": [{"name": target.model}]},
        "endpoint": {
            "urls": [target.url or "http://localhost"],
            "type": "completions",
            "streaming": True,
        },
        "datasets": [
            {"name": "main", "type": "synthetic", "entries": figures.sent, "prompts": lengths}
        ],
        "phases": [{"name": "profiling", "requests": figures.sent, **arrivals}],
    }


def _errors(failed: Sequence[Record]) -> list[dict[str, Any]]:
    kinds = Counter(
        (record.failure.code, str(record.failure.fault), record.failure.message)
        for record in failed
        if record.failure is not None
    )
    return [
        {"error_details": {"code": code, "type": fault, "message": message}, "count": count}
        for (code, fault, message), count in kinds.most_common()
    ]


def _line(run: Run, record: Record) -> dict[str, Any]:
    def ns(seconds: float) -> int:
        return run.seen.start_ns + round(seconds * 1e9)

    failure = record.failure
    if failure is None:
        metrics = {
            metric.name: {"value": value, "unit": metric.unit}
            for metric in _METRICS
            if (value := metric.of(record)) is not None
        }
        chunks = [after - before for before, after in pairwise(record.arrivals)]
        metrics["inter_chunk_latency"] = {"value": [c * 1e3 for c in chunks], "unit": "ms"}
    else:
        metrics = {"error_isl": {"value": len(record.ask.prompt), "unit": "tokens"}}
    return {
        "metadata": {
            "session_num": record.ask.session,
            "x_request_id": record.ask.id,
            "x_correlation_id": f"{run.label}-{record.ask.session}",
            "conversation_id": f"{run.label}-{record.ask.session}",
            "turn_index": record.ask.turn,
            "credit_issued_ns": ns(record.ask.due),
            "request_start_ns": ns(record.start),
            "request_ack_ns": ns(record.arrivals[0]) if record.arrivals else None,
            "request_end_ns": ns(record.end),
            "worker_id": "bifolio",
            "record_processor_id": "bifolio",
            "benchmark_phase": "profiling",
            "was_cancelled": False,
        },
        "metrics": metrics,
        "error": None
        if failure is None
        else {"code": failure.code, "type": str(failure.fault), "message": failure.message},
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
