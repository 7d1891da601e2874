"""Everything that a plan means for a deployment and a workload, as values and as JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from bifolio.errors import ConfigError
from bifolio.formats import BF16, PhasePlan, PrecisionPlan
from bifolio.lab.plan.capacity import Capacity, Deployment, capacity
from bifolio.lab.plan.hardware import Device
from bifolio.lab.plan.phases import (
    Choice,
    PhaseChoice,
    best_choice,
    decode_choice,
    prefill_choice,
    weight_candidates,
)
from bifolio.lab.plan.planned_workload import PlannedWorkload
from bifolio.lab.plan.roofline import limits
from bifolio.lab.plan.speed import (
    DecodeSpeed,
    PrefillSpeed,
    Range,
    cost_per_million,
    decode_ranges,
    decode_speeds,
    prefill_ranges,
    prefill_speed,
)
from bifolio.lab.plan.steps import PREFILL_CHUNK, Prefill
from bifolio.spec.weights import Kind

CONTEXTS = (2048, 8192, 32_768, 131_072)
"""Tokens of a request for which reports say how many fit."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked. `name` and `notes` describe the model and come back in the report.

    `price` is that of one device for an hour. `most` limits the requests at once, `slowest` the
    seconds per output token, when the best plan is sought.
    """

    name: str
    deployment: Deployment
    plan: PrecisionPlan
    workload: PlannedWorkload
    price: float | None = None
    most: int | None = None
    slowest: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """The answer.

    `asked` is the plan itself on the workload; `best` is the cheapest plan in one pool and in two.
    Each is None where the workload does not fit.
    """

    question: Question
    prefill_room: Capacity
    decode_room: Capacity
    requests: int
    """Requests of the workload that fit at once."""
    decode: list[DecodeSpeed]
    prefill: PrefillSpeed
    decode_wins: list[Range]
    prefill_wins: list[Range]
    asked: Choice | None
    best: tuple[Choice | None, Choice | None]

    @property
    def choices(self) -> dict[str, Choice | None]:
        """The plan that was asked about and the cheapest ones, by name."""
        return {"asked": self.asked, "one_pool": self.best[0], "two_pools": self.best[1]}

    @property
    def contexts(self) -> tuple[int, ...]:
        """Lengths for which reports say how many requests fit: round ones and the model's own."""
        longest = self.question.deployment.model.max_position
        return (*(n for n in CONTEXTS if n < longest), longest)

    @property
    def cost_in(self) -> float | None:
        """Price of a million prompt tokens at the ceiling."""
        return self._cost(self.prefill.tokens_per_second)

    @property
    def cost_out(self) -> float | None:
        """Price of a million output tokens at the ceiling, with as many requests as fit."""
        fitting = [speed.tokens_per_second for speed in self.decode if speed.fits]
        return self._cost(max(fitting)) if fitting else None

    def cost_at(self, speed: DecodeSpeed) -> float | None:
        """Price of a million output tokens at a concurrency."""
        return self._cost(speed.tokens_per_second)

    def _cost(self, rate: float) -> float | None:
        price = self.question.price
        return None if price is None else cost_per_million(self.question.deployment, price, rate)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the figures rest on, one line each."""
        return tuple(_assumptions(self))

    def as_dict(self) -> dict[str, Any]:
        """For programs. Sizes in bytes, times in seconds, rates per second."""
        question, deployment = self.question, self.question.deployment
        plan, device = question.plan, deployment.device
        return {
            "model": question.name,
            "device": {
                "name": device.name,
                "memory_bytes": device.memory_bytes,
                "usable_bytes": deployment.usable_bytes,
                "read_bytes_per_second": device.read_bytes,
                "bf16_operations_per_second": device.bf16_ops,
                "source": device.source,
            },
            "tp": deployment.tp,
            "plan": str(plan),
            "cache_tokens": self.decode_room.tokens,
            "cache_bytes_per_token": self.decode_room.page.token_bytes,
            "weight_bytes_per_device": self.decode_room.weight_bytes,
            "requests_that_fit": self.requests,
            "requests_by_context": {str(n): self.decode_room.requests(n) for n in self.contexts},
            "phases": {
                "prefill": _phase_dict(deployment, plan.prefill, self.prefill_room)
                | {
                    "tokens_per_second": self.prefill.tokens_per_second,
                    "first_token_seconds": self.prefill.first_token,
                    "bound": self.prefill.bound,
                    "cost_per_million": self.cost_in,
                },
                "decode": _phase_dict(deployment, plan.decode, self.decode_room)
                | {"ceilings": [self._speed_dict(speed) for speed in self.decode]},
            },
            "fastest_weights": {
                "decode_by_requests": [_range_dict(r) for r in self.decode_wins],
                "prefill_by_step_tokens": [_range_dict(r) for r in self.prefill_wins],
            },
            "workload": _workload_dict(question.workload),
            "on_workload": {
                name: None if choice is None else self._choice_dict(choice)
                for name, choice in self.choices.items()
            },
            "assumptions": list(self.assumptions),
        }

    def _speed_dict(self, speed: DecodeSpeed) -> dict[str, Any]:
        return {
            "concurrency": speed.concurrency,
            "fits": speed.fits,
            "tokens_per_second": speed.tokens_per_second,
            "seconds_per_token": speed.seconds,
            "bound": speed.bound,
            "cost_per_million": self.cost_at(speed),
        }

    def _choice_dict(self, choice: Choice) -> dict[str, Any]:
        price = self.question.price
        seconds = choice.worker_seconds
        hour = None if price is None else price * self.question.deployment.tp
        return {
            "prefill": _phase_choice_dict(choice.prefill),
            "decode": _phase_choice_dict(choice.decode),
            "worker_seconds_per_request": seconds,
            "cost_per_request": None if hour is None else seconds * hour / 3600,
            "prefill_workers_per_decode_worker": choice.ratio if choice.pools == 2 else None,
            "workers": list(choice.workers) if choice.pools == 2 else None,
        }


def answer(question: Question) -> CapacityReport:
    """Compute everything. ConfigError if the plan's weights do not fit or cannot be cut."""
    deployment, plan, workload = question.deployment, question.plan, question.workload
    prefill_room = capacity(deployment, plan.prefill)
    decode_room = capacity(deployment, plan.decode)
    mean = max(1, round(workload.mean_prompt))
    requests = decode_room.requests(math.ceil(workload.reserved))
    formats = weight_candidates(deployment.device)
    return CapacityReport(
        question=question,
        prefill_room=prefill_room,
        decode_room=decode_room,
        requests=requests,
        decode=decode_speeds(deployment, plan.decode, workload.context, requests),
        prefill=prefill_speed(deployment, plan.prefill, Prefill(workload.prompts), mean),
        decode_wins=decode_ranges(deployment, formats, plan.decode, workload.context),
        prefill_wins=prefill_ranges(deployment, formats, plan.prefill, mean),
        asked=_asked(question),
        best=(_best(question, 1), _best(question, 2)),
    )


def _asked(question: Question) -> Choice | None:
    plan, deployment, workload = question.plan, question.deployment, question.workload
    try:
        return Choice(
            prefill_choice(deployment, plan.prefill, workload),
            decode_choice(deployment, plan.decode, workload, question.most, question.slowest),
            pools=1 if plan.prefill == plan.decode else 2,
        )
    except ConfigError:
        return None


def _best(question: Question, pools: int) -> Choice | None:
    try:
        return best_choice(
            question.deployment, question.workload, pools, question.most, question.slowest
        )
    except ConfigError:
        return None


def _assumptions(report: CapacityReport) -> list[str]:
    question, deployment = report.question, report.question.deployment
    device, plan, model = deployment.device, question.plan, deployment.model
    lines = [
        f"{deployment.memory_share} % of the {device.memory_bytes:,} B of each {device.name} are "
        f"for weights and cache; {device.source}",
        _rates(device),
        "GB are 10⁹ bytes, GiB 2³⁰ bytes",
    ]
    for name, phase in _phases(plan).items():
        storage = deployment.storage(phase)
        lines.append(f"weights{name}: {storage.describe()} ({storage.source})")
    lines += question.notes
    if model.mtp_layers:
        lines.append("multi-token-prediction layers are in the checkpoint, but not served")
    if deployment.tp > 1:
        cut = "the latent stands on every device" if model.mla else "KV heads are cut"
        lines.append(
            f"tensor parallelism {deployment.tp}: heads, expert widths and vocabulary are cut, "
            f"{cut}; latent projections, indexer, router and norms stand on every device"
        )
    lines += _two_phases(report)
    if model.moe:
        lines.append(
            "experts may be mapped from files by `bifolio serve --experts mapped`, on processors; "
            "tokens and ceilings count them in memory"
        )
    page = report.decode_room.page
    lines.append(
        f"pages of {page.page_size} tokens with their {page.page_bytes:,} B ({page.layout}), "
        "header included; a request reserves all the tokens it may come to hold"
    )
    if model.indexer:
        lines.append(
            f"index keys stand in the {len(model.indexer.owners)} of {model.layers} layers that "
            "own an index"
        )
    lines += limits(model)
    lines.append(f"prefill in steps of {PREFILL_CHUNK:,} tokens, the steps always full")
    lines.append("handing pages from a prefill to a decode worker is not counted")
    return lines


def _two_phases(report: CapacityReport) -> list[str]:
    plan, deployment = report.question.plan, report.question.deployment
    lines = []
    if deployment.storage(plan.prefill).formats != deployment.storage(plan.decode).formats:
        both = report.prefill_room.weight_bytes + report.decode_room.weight_bytes
        lines.append(
            "each phase has devices of its own; one process for both would hold both copies of the "
            f"weights, up to {both / 1e9:,.1f} GB a device"
        )
    decode = deployment.storage(plan.decode)
    if deployment.model.mla and not decode.absorbs and decode.kind(Kind.ATTENTION) != BF16:
        lines.append("kv_b_proj is counted as stored; its bf16 copy for absorbed decode is not")
    return lines


def _rates(device: Device) -> str:
    """`reads 4,800 GB/s; 989 TFLOP/s in bf16, …`."""
    peaks = {"bf16": device.bf16_ops, "fp8": device.fp8_ops, "int8": device.int8_ops}
    shown = [f"{_rounded(ops / 1e12)} in {name}" for name, ops in peaks.items() if ops]
    reads = _rounded(device.read_bytes / 1e9)
    line = f"it reads {reads} GB/s; 10¹² operations/s: {', '.join(shown)}"
    if device.fp8_unpack:
        line += f"; 10¹² e4m3 numbers unpacked/s: {device.fp8_unpack / 1e12:.3g}"
    return line


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _phases(plan: PrecisionPlan) -> dict[str, PhasePlan]:
    if plan.prefill == plan.decode:
        return {"": plan.decode}
    return {" of prefill": plan.prefill, " of decode": plan.decode}


def _phase_dict(deployment: Deployment, phase: PhasePlan, room: Capacity) -> dict[str, Any]:
    return {
        "formats": str(phase),
        "checkpoint_bytes": deployment.checkpoint_bytes(phase),
        "weight_bytes": {str(kind): nbytes for kind, nbytes in room.weights.items()},
        "weight_bytes_per_device": room.weight_bytes,
        "weight_bytes_resident": room.resident_bytes,
        "weight_bytes_mappable": room.mappable_bytes,
        "cache_bytes": room.cache_bytes,
        "cache_tokens": room.tokens,
        "cache_bytes_per_token": room.page.token_bytes,
        "page_bytes": room.page.page_bytes,
        "page_size": room.page.page_size,
    }


def _range_dict(found: Range) -> dict[str, Any]:
    return {"first": found.first, "last": found.last, "formats": list(found.winners)}


def _phase_choice_dict(choice: PhaseChoice) -> dict[str, Any]:
    return {
        "formats": str(choice.plan),
        "tokens_per_second": choice.tokens_per_second,
        "requests_per_second": choice.requests_per_second,
        "concurrency": choice.concurrency,
        "seconds_per_token": choice.seconds_per_token or None,
    }


def _workload_dict(workload: PlannedWorkload) -> dict[str, Any]:
    return {
        "requests": workload.requests,
        "mean_prompt_tokens": workload.mean_prompt,
        "mean_output_tokens": workload.mean_output,
        "mean_context_of_a_decode_step": workload.context,
        "mean_reserved_tokens": workload.reserved,
        "repeated_prompt_share": workload.repeated,
    }
