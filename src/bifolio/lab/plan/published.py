"""The published figures that the planner is held to, each beside what it predicts.

Source: the report of a hosting provider on serving Kimi K2.6 and GLM-5.2 with SGLang ("Smaller,
faster, safer: running Kimi and GLM at scale", 3 August 2026). Capacity has to agree within 3 %.
Of speed the planner knows ceilings, so absolute figures are shown as a share of the ceiling, and
ratios of two figures are compared in direction and size.
"""

from __future__ import annotations

from dataclasses import dataclass

from bifolio.formats import PhasePlan, PrecisionPlan
from bifolio.lab.plan.capacity import Deployment, capacity
from bifolio.lab.plan.hardware import DEVICES
from bifolio.lab.plan.presets import PRESETS
from bifolio.lab.plan.roofline import step_time, tokens_per_second
from bifolio.lab.plan.steps import Decode, Prefill
from bifolio.lab.plan.storage import read_checkpoint

TOLERANCE = 0.03
"""Greatest relative distance of a predicted capacity."""

EVEN = 0.05
"""Ratios closer than this to 1 count as neither faster nor slower."""

_GIB = 2**30
_TP = 8
_KIMI_TOKENS, _KIMI_REQUESTS = 686_000, 32
_PROMPT, _OUTPUT = 8192, 1000
_INT4 = "weights=bf16,experts=int4:g32"
_GLM_FP8, _GLM_INT4 = "auto/fp8:token", f"{_INT4},cache=fp8:token"
_GLM_EXPERTS_ALONE = "weights=fp8,experts=int4:g32,cache=fp8:token"
_KIMI_CONTEXT, _GLM_CONTEXT = _KIMI_TOKENS / _KIMI_REQUESTS, _PROMPT + _OUTPUT / 2


@dataclass(frozen=True, slots=True)
class CapacityRow:
    """A figure that the planner has to reproduce."""

    what: str
    published: float
    predicted: float
    unit: str

    @property
    def error(self) -> float:
        """Relative distance of the prediction."""
        return self.predicted / self.published - 1

    @property
    def agrees(self) -> bool:
        return abs(self.error) <= TOLERANCE


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """A measured rate in tokens a second, and the ceiling that the planner computes for it."""

    what: str
    published: float
    ceiling: float

    @property
    def share(self) -> float:
        """What part of the ceiling was reached."""
        return self.published / self.ceiling


@dataclass(frozen=True, slots=True)
class RatioRow:
    """What a change of format did to a rate or a cost, and what the planner says of it."""

    what: str
    published: float
    predicted: float
    note: str = ""

    @property
    def agrees(self) -> bool:
        """Whether both are faster, both slower, or both about equal."""
        return _direction(self.published) == _direction(self.predicted)


@dataclass(frozen=True, slots=True)
class Published:
    """The whole comparison."""

    capacity: tuple[CapacityRow, ...]
    speed: tuple[SpeedRow, ...]
    ratios: tuple[RatioRow, ...]
    assumptions: tuple[str, ...]


def preset_deployment(model: str, device: str, tp: int) -> Deployment:
    """A preset as published, on `tp` devices."""
    spec, stored = read_checkpoint(PRESETS[model].config)
    return Deployment(spec, stored, DEVICES[device], tp)


def compare_published() -> Published:
    """Predict every published figure."""
    kimi = preset_deployment("kimi-k2.6", "h200", _TP)
    glm = preset_deployment("glm-5.2", "h200", _TP)
    speed = _speed(kimi, glm)
    assumptions = (*_assumptions(glm), _implied_context(kimi, speed[2]))
    return Published(_capacity(kimi, glm), speed, _ratios(speed, glm), assumptions)


def _phase(text: str) -> PhasePlan:
    return PrecisionPlan.parse(text).decode


def _capacity(kimi: Deployment, glm: Deployment) -> tuple[CapacityRow, ...]:
    bf16, fp8 = (capacity(kimi, _phase(f"auto/{cache}")).tokens for cache in ("bf16", "fp8"))
    stored, int4 = (glm.checkpoint_bytes(_phase(w)) / _GIB for w in ("auto", _INT4))
    return (
        CapacityRow("Kimi K2.6, bf16 cache: tokens that fit", 686_000, bf16, "tokens"),
        CapacityRow("Kimi K2.6, fp8 cache: tokens that fit", 1_370_000, fp8, "tokens"),
        CapacityRow("GLM-5.2, fp8 checkpoint", 705, stored, "GiB"),
        CapacityRow("GLM-5.2, int4 checkpoint", 421, int4, "GiB"),
        CapacityRow("GLM-5.2, fp8 checkpoint, per GPU of 8", 88, stored / _TP, "GiB"),
        CapacityRow("GLM-5.2, int4 checkpoint, per GPU of 8", 52, int4 / _TP, "GiB"),
        CapacityRow(
            "GLM-5.2, int4 weights, fp8:token cache: tokens that fit",
            1_180_000,
            capacity(glm, _phase(_GLM_INT4)).tokens,
            "tokens",
        ),
    )


def _decode(deployment: Deployment, plan: str, requests: int, context: float) -> float:
    return tokens_per_second(deployment, _phase(plan), Decode(requests, context))


def _speed(kimi: Deployment, glm: Deployment) -> tuple[SpeedRow, ...]:
    def prefill(plan: str) -> float:
        return tokens_per_second(glm, _phase(plan), Prefill.of(_PROMPT))

    return (
        SpeedRow(
            "Kimi K2.6, bf16 cache, 32 at once", 1558, _decode(kimi, "auto", 32, _KIMI_CONTEXT)
        ),
        SpeedRow("Kimi, fp8 cache, 32 at once", 1489, _decode(kimi, "auto/fp8", 32, _KIMI_CONTEXT)),
        SpeedRow("Kimi, fp8 cache, 64 at once", 2192, _decode(kimi, "auto/fp8", 64, _KIMI_CONTEXT)),
        SpeedRow("GLM-5.2, fp8, decode at 1", 60, _decode(glm, _GLM_FP8, 1, _GLM_CONTEXT)),
        SpeedRow("GLM-5.2, int4, decode at 1", 92, _decode(glm, _GLM_INT4, 1, _GLM_CONTEXT)),
        SpeedRow("GLM-5.2, fp8, decode at 32", 994, _decode(glm, _GLM_FP8, 32, _GLM_CONTEXT)),
        SpeedRow("GLM-5.2, int4, decode at 32", 1267, _decode(glm, _GLM_INT4, 32, _GLM_CONTEXT)),
        SpeedRow("GLM-5.2, fp8, prefill", 10_160, prefill(_GLM_FP8)),
        SpeedRow("GLM-5.2, int4, prefill", 8_660, prefill(_GLM_INT4)),
    )


def _implied_context(kimi: Deployment, measured: SpeedRow) -> str:
    """What a decode rate says of the context: a step cannot take less than its ceiling's time."""
    requests = 2 * _KIMI_REQUESTS
    plan = _phase("auto/fp8")
    time = step_time(kimi, plan, Decode(requests, _KIMI_CONTEXT))
    per_token = time.attention / _KIMI_CONTEXT
    most = (requests / measured.published - time.weights) / per_token
    return (
        f"{measured.what}: {measured.published:,.0f} tokens/s are possible with at most "
        f"{most:,.0f} tokens of a request in the cache, on average over its answer; with the "
        f"{_KIMI_CONTEXT:,.0f} of a full cache, which are the most there can be at its end, "
        f"{measured.share:.0%} of the ceiling were measured"
    )


def _why_int4_loses_alone(glm: Deployment, fp8_1: SpeedRow, int4_1: SpeedRow) -> str:
    """The two changes that one published row is made of, and why bytes do not decide there."""
    alone = _decode(glm, _GLM_EXPERTS_ALONE, 1, _GLM_CONTEXT)
    return (
        f"the experts alone make ×{alone / fp8_1.ceiling:.2f}; that the rest of the model, which "
        f"every token reads, is bf16 in place of fp8 (the size of the checkpoint says so) makes "
        f"×{int4_1.ceiling / alone:.2f}. And a single request reached {fp8_1.share:.0%} and "
        f"{int4_1.share:.0%} of the ceilings: it waits for launches and communication, which are "
        "not modelled, not for bytes"
    )


def _ratios(speed: tuple[SpeedRow, ...], glm: Deployment) -> tuple[RatioRow, ...]:
    kimi_bf16, kimi_fp8, kimi_64, fp8_1, int4_1, fp8_32, int4_32, fp8_in, int4_in = speed

    def ratio(what: str, after: SpeedRow, before: SpeedRow, note: str = "") -> RatioRow:
        published = after.published / before.published
        return RatioRow(what, published, after.ceiling / before.ceiling, note)

    peak = ratio("Kimi, cache bf16 → fp8, each at its most requests (32, 64)", kimi_64, kimi_bf16)
    return (
        ratio("Kimi, cache bf16 → fp8, both at 32", kimi_fp8, kimi_bf16),
        peak,
        RatioRow("Kimi, cost per token at those peaks", 0.7, 1 / peak.predicted),
        ratio(
            "GLM-5.2, weights fp8 → int4, decode at 1",
            int4_1,
            fp8_1,
            _why_int4_loses_alone(glm, fp8_1, int4_1),
        ),
        ratio("GLM-5.2, weights fp8 → int4, decode at 32", int4_32, fp8_32),
        ratio("GLM-5.2, weights fp8 → int4, prefill", int4_in, fp8_in),
    )


def _direction(ratio: float) -> int:
    return (ratio > 1 + EVEN) - (ratio < 1 - EVEN)


def _assumptions(glm: Deployment) -> tuple[str, ...]:
    phase = _phase(_GLM_INT4)
    room = capacity(glm, phase)
    page, indexer = room.page, glm.model.indexer
    assert indexer is not None
    everywhere = page.page_bytes + (glm.model.layers - len(indexer.owners)) * page.index_bytes
    other = room.cache_bytes // everywhere * page.page_size
    return (
        f"8 × H200 at tensor parallelism 8; {glm.memory_share} % of device memory for weights and "
        "cache in every row",
        "the published GB of checkpoints are GiB: 743 billion parameters in fp8 cannot be 705e9 "
        "bytes; a checkpoint holds the multi-token-prediction layer, the served model does not",
        "int4 means groups of 32 in the routed experts only, as in Kimi's checkpoint; the rest of "
        "GLM-5.2 is then bf16",
        f"the published 88 and 52 per GPU are an eighth of the checkpoint; resident are "
        f"{room.weight_bytes / _GIB:.1f} GiB with int4, since what makes the latent, the indexer, "
        "the router and the norms stand on every GPU",
        f"index keys stand in the {len(indexer.owners)} layers that own an index; kept in all "
        f"{glm.model.layers}, as SGLang did until July 2026, {other:,} tokens would fit "
        f"({other / 1_180_000 - 1:+.0%})",
        f"the tokens per request of Kimi's speed figures are not published: {_KIMI_TOKENS:,} / "
        f"{_KIMI_REQUESTS} in the cache are taken, since a 33rd request did not fit; that is the "
        "most, so a measured figure may exceed the ceiling that follows from it",
        f"GLM-5.2's speed figures are taken to be for {_PROMPT:,} tokens in and {_OUTPUT:,} out",
    )
