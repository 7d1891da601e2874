"""How fast a step could be at best on one rank: each term at the device's bandwidth or peak.

    matrix      max(bytes read / bandwidth, 2 · rows · n · k / peak of its format)
    experts     as a matrix, for the experts that the step's tokens hit: with top_k of routed
                chosen evenly and independently, routed · (1 − (1 − top_k / routed)^tokens) of them
    attention   max(cache read / bandwidth, operations / bf16 peak, e4m3 numbers / unpack rate)
    step        the sum of all of these

Not in it: communication between devices, launches and synchronisation, sampling, activations,
kernels below their peak, padding. So it is a ceiling; what a system reaches is a part of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from bifolio.formats import BF16, CacheFormat, Number, PhasePlan
from bifolio.lab.plan.capacity import Deployment
from bifolio.lab.plan.hardware import Device
from bifolio.lab.plan.shapes import MatrixGroup
from bifolio.lab.plan.steps import Decode, Step
from bifolio.lab.plan.storage import Storage
from bifolio.spec import IndexerSpec, MLASpec, ModelSpec
from bifolio.spec.weights import Kind


class Bound(StrEnum):
    """What a term, or most of a step, waits for."""

    MEMORY = "memory"
    ARITHMETIC = "arithmetic"
    UNPACKING = "unpacking"


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step on one rank: of its matrices, of attention, and what most waits for."""

    weights: float
    attention: float
    bound: Bound

    @property
    def seconds(self) -> float:
        return self.weights + self.attention


@dataclass(frozen=True, slots=True)
class _Term:
    """Seconds of each kind; they overlap, so the longest counts."""

    memory: float
    arithmetic: float
    unpacking: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.memory, self.arithmetic, self.unpacking)

    @property
    def bound(self) -> Bound:
        if self.memory >= self.seconds:
            return Bound.MEMORY
        return Bound.ARITHMETIC if self.arithmetic >= self.seconds else Bound.UNPACKING


def limits(model: ModelSpec) -> list[str]:
    """Assumptions of the ceiling, for reports."""
    lines = [
        "communication between devices, kernel launches, sampling and activations are not counted",
        "weights are unpacked for free; e4m3 pages too, unless the device has a known rate",
    ]
    if model.moe:
        lines.append(
            "experts are hit evenly and independently: "
            "routed · (1 − (1 − top_k / routed)^tokens) of them are read"
        )
    return lines


def experts_hit(routed: int, top_k: int, tokens: float) -> float:
    """Expected number of distinct experts that `tokens` tokens choose, each `top_k` of `routed`."""
    missed: float = (1.0 - top_k / routed) ** tokens
    return routed * (1.0 - missed)


def step_time(deployment: Deployment, phase: PhasePlan, step: Step) -> StepTime:
    """The ceiling of one step with the formats of a phase."""
    storage = deployment.storage(phase)
    weights = [_matrix(deployment, storage, matrix, step) for matrix in _met(deployment, storage)]
    attention = _attention(deployment, phase.cache, step)
    waiting = dict.fromkeys(Bound, 0.0)
    for term in (*weights, *attention):
        waiting[term.bound] += term.seconds
    return StepTime(
        weights=sum(term.seconds for term in weights),
        attention=sum(term.seconds for term in attention),
        bound=max(waiting, key=lambda bound: waiting[bound]),
    )


def tokens_per_second(deployment: Deployment, phase: PhasePlan, step: Step) -> float:
    """Tokens that all devices of a deployment together bring through the model in a second."""
    return step.rows / step_time(deployment, phase, step).seconds


def _met(deployment: Deployment, storage: Storage) -> list[MatrixGroup]:
    """Matrices that a step multiplies with: the embedding only where it is the head too."""
    tied = deployment.model.tie_embeddings
    return [
        matrix
        for matrix in storage.served(deployment.model).matrices
        if tied or matrix.kind is not Kind.EMBEDDING
    ]


def _matrix(deployment: Deployment, storage: Storage, matrix: MatrixGroup, step: Step) -> _Term:
    fmt, moe, device = storage.of(matrix), deployment.model.moe, deployment.device
    n, k = matrix.shard(deployment.tp, fmt)
    read, multiplied = float(matrix.count), float(matrix.count * step.rows)
    if matrix.kind in (Kind.HEAD, Kind.EMBEDDING):
        multiplied = step.logits
    elif matrix.kind is Kind.ROUTED_EXPERTS:
        assert moe is not None
        layers = matrix.count / moe.routed
        read = layers * experts_hit(moe.routed, moe.top_k, step.rows)
        multiplied = layers * step.rows * moe.top_k
    elif matrix.name == "kv_b_proj" and _expands(deployment, step):
        multiplied = max(multiplied, matrix.count * step.reads())
    return _Term(
        memory=read * fmt.nbytes(n, k) / device.read_bytes,
        arithmetic=2.0 * multiplied * n * k / device.peak(fmt),
    )


def _expands(deployment: Deployment, step: Step) -> bool:
    """Whether latents become keys and values again: in prefill over all tokens.

    Decode works on the latents themselves (absorbed), and so does attention to chosen tokens.
    """
    return not isinstance(step, Decode) and deployment.model.indexer is None


def _attention(deployment: Deployment, cache: CacheFormat, step: Step) -> list[_Term]:
    model = deployment.model
    if model.mla is None:
        layers = Counter(model.windows or (None,) * model.layers)
        return [
            _grouped(deployment, cache, step, window, count) for window, count in layers.items()
        ]
    terms = [_latent(deployment, model.mla, cache, step)]
    if model.indexer:
        terms.append(_index(deployment, model.indexer, cache, step))
    return terms


def _grouped(
    deployment: Deployment, cache: CacheFormat, step: Step, window: int | None, layers: int
) -> _Term:
    model, device, page = deployment.model, deployment.device, deployment.pages(cache)
    vectors = step.reads(window) * layers
    heads = model.heads / deployment.tp
    return _Term(
        memory=vectors * page.layer_bytes / page.page_size / device.read_bytes,
        arithmetic=4.0 * step.pairs(window) * layers * heads * model.head_dim / device.peak(BF16),
        unpacking=_unpacking(device, cache, 2.0 * vectors * page.kv_heads * page.head_dim),
    )


def _latent(deployment: Deployment, mla: MLASpec, cache: CacheFormat, step: Step) -> _Term:
    model, device, page = deployment.model, deployment.device, deployment.pages(cache)
    top_k = model.indexer.top_k if model.indexer else None
    # A prompt's queries together choose nearly all tokens: each is read once.
    vectors = step.reads(top_k if isinstance(step, Decode) else None) * model.layers
    per_pair = mla.qk + mla.v if _expands(deployment, step) else mla.record + mla.kv_lora
    heads = model.heads / deployment.tp
    return _Term(
        memory=vectors * page.layer_bytes / page.page_size / device.read_bytes,
        arithmetic=2.0 * step.pairs(top_k) * model.layers * heads * per_pair / device.peak(BF16),
        # With a scale per token the rotated part is bf16 already.
        unpacking=_unpacking(
            device, cache, vectors * (mla.kv_lora if cache.token_scales else mla.record)
        ),
    )


def _index(deployment: Deployment, indexer: IndexerSpec, cache: CacheFormat, step: Step) -> _Term:
    """Scores of all tokens in the layers that own an index, on every rank, in the keys' format."""
    page, device, owners = deployment.pages(cache), deployment.device, len(indexer.owners)
    operations = 2.0 * step.pairs() * owners * indexer.heads * indexer.dim
    return _Term(
        memory=step.reads() * owners * page.index_bytes / page.page_size / device.read_bytes,
        arithmetic=operations / (device.fp8_ops or device.bf16_ops),
    )


def _unpacking(device: Device, cache: CacheFormat, numbers: float) -> float:
    """Seconds to make bf16 of e4m3 numbers, where the device has to."""
    if cache.number is not Number.FP8 or device.fp8_unpack is None:
        return 0.0
    return numbers / device.fp8_unpack
