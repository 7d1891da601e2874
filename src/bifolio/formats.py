"""Number formats as frozen values: one text spelling each, every byte question answered here.

Weights   `bf16` · `fp8` (= `fp8:b128`) · `fp8:channel` · `fp8:tensor` · `int8` · `int8:g32` ·
          `int4:g32` · `int4:g64` · `int4:g128`; `:z` adds a zero point per group, `:a8` multiplies
          with int8 activations (one scale per token and 64 inputs, or per group if that is less).
          `fp32` exists for tests and references.
Cache     `bf16` · `fp8` (e4m3, one static scale per layer and head) · `fp8:token` (one fp16 scale
          per token and head; latent attention: one fp32 scale per token and 128 latents, the
          rotated key in bf16) · `fp32` for tests.
Plans     `weights/cache`, e.g. `int4:g32:a8/fp8`, or `weights=fp8,cache=bf16,head=int8,page=16`;
          one for each phase, `PREFILL->DECODE` (or `→`) where they differ. `auto` weights mean: as
          the checkpoint stores them.

A group that does not divide the row ends in a short tail: k numbers have ceil(k / g) groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import StrEnum

from bifolio.errors import ConfigError

E4M3_MAX = 448.0
"""Largest finite number of float8 e4m3fn."""

FP8_BLOCK = 128
"""Side of the square weight blocks that share one scale in `fp8:b128`."""

ACTIVATION_GROUP = 64
"""Most inputs that share a scale of int8 activations: one outlier must not blind a whole row."""

SCALE_BYTES = 2
"""Bytes of one scale (fp16 or bf16) of a group, a channel of int8, or a token of the cache."""

FP8_SCALE_BYTES = 4
"""Bytes of one fp32 scale of an fp8 weight (block, channel or tensor)."""


class Phase(StrEnum):
    """Part of a request's life that a position belongs to: below the prompt's length, prefill."""

    PREFILL = "prefill"
    DECODE = "decode"


class Number(StrEnum):
    """How one number is stored."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def bits(self) -> int:
        return _BITS[self]


_BITS = {Number.FP32: 32, Number.BF16: 16, Number.FP8: 8, Number.INT8: 8, Number.INT4: 4}


class Scaling(StrEnum):
    """Which numbers of a weight matrix share a scale."""

    NONE = "none"
    TENSOR = "tensor"
    CHANNEL = "channel"
    BLOCK = "block"
    GROUP = "group"


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Storage of a weight matrix [n, k] (rows are output channels) and width of its activations.

    `group` numbers along k share one 2-byte scale (0: no groups). `zero_points` adds two bytes per
    group: a number is `scale * code + offset`, or in checkpoints that keep the code that means zero
    `scale * (code - zero)`. `int8_activations` means that the
    product is taken with activations quantised to int8, per token and `activation_group` inputs.
    """

    number: Number
    scaling: Scaling = Scaling.NONE
    group: int = 0
    zero_points: bool = False
    int8_activations: bool = False

    @classmethod
    def parse(cls, text: str) -> WeightFormat:
        """Read a spelling such as `int4:g32:a8`; ConfigError names what is wrong with it."""
        found = _WEIGHT_FORMATS.get(text.strip().lower())
        if found is None:
            raise ConfigError(f"unknown weight format {text!r}; {_hint(text)}")
        return found

    def __str__(self) -> str:
        parts = [str(self.number)]
        if self.number is Number.FP8 and self.scaling is not Scaling.BLOCK:
            parts.append(str(self.scaling))
        if self.group:
            parts.append(f"g{self.group}")
        if self.zero_points:
            parts.append("z")
        if self.int8_activations:
            parts.append("a8")
        return ":".join(parts)

    @property
    def activation_group(self) -> int:
        """Inputs that share a scale of int8 activations: those of a weight group, at most 64."""
        return min(self.group or ACTIVATION_GROUP, ACTIVATION_GROUP)

    def groups(self, k: int) -> int:
        """Number of groups in a row of k numbers; the last may be short."""
        return -(-k // self.group) if self.group else 0

    def code_bytes(self, n: int, k: int) -> int:
        """Bytes of the codes of an [n, k] matrix; a row starts on a byte."""
        return n * -(-k * self.number.bits // 8)

    def scale_bytes(self, n: int, k: int) -> int:
        """Bytes of scales and offsets of an [n, k] matrix."""
        match self.scaling:
            case Scaling.NONE:
                return 0
            case Scaling.TENSOR:
                return FP8_SCALE_BYTES
            case Scaling.CHANNEL:
                return n * (FP8_SCALE_BYTES if self.number is Number.FP8 else SCALE_BYTES)
            case Scaling.BLOCK:
                return FP8_SCALE_BYTES * -(-n // FP8_BLOCK) * -(-k // FP8_BLOCK)
            case Scaling.GROUP:
                return n * self.groups(k) * SCALE_BYTES * (2 if self.zero_points else 1)

    def nbytes(self, n: int, k: int) -> int:
        """Bytes of an [n, k] matrix: codes, scales and offsets, without padding."""
        return self.code_bytes(n, k) + self.scale_bytes(n, k)


def _spell_weight_formats() -> dict[str, WeightFormat]:
    base = [
        WeightFormat(Number.BF16),
        WeightFormat(Number.FP32),
        WeightFormat(Number.FP8, Scaling.BLOCK),
        WeightFormat(Number.FP8, Scaling.CHANNEL),
        WeightFormat(Number.FP8, Scaling.TENSOR),
        WeightFormat(Number.INT8, Scaling.CHANNEL),
        WeightFormat(Number.INT8, Scaling.GROUP, 32),
        *(
            WeightFormat(Number.INT4, Scaling.GROUP, group, zero_points)
            for group in (32, 64, 128)
            for zero_points in (False, True)
        ),
    ]
    int8_activations = [
        WeightFormat(f.number, f.scaling, f.group, f.zero_points, int8_activations=True)
        for f in base
        if f.number in (Number.INT8, Number.INT4)
    ]
    return {str(f): f for f in base + int8_activations} | {
        "fp8:b128": WeightFormat(Number.FP8, Scaling.BLOCK)
    }


_WEIGHT_FORMATS = _spell_weight_formats()


def _hint(text: str) -> str:
    """What to write instead of a weight format that there is none of."""
    parts = text.strip().lower().split(":")
    near = max(_WEIGHT_FORMATS, key=lambda known: _likeness(parts, known))
    number, _, likeness = _likeness(parts, near)
    words = [f"did you mean {near}?"] if number or likeness > 0.6 else []
    if "a8" in parts[1:] and parts[0] not in ("int8", "int4"):
        words.append(":a8 belongs to int8 and int4;")
    words.append("formats are such as bf16, fp8, int8, int4:g32:a8, all of them in docs/formats.md")
    return " ".join(words)


def _likeness(parts: list[str], known: str) -> tuple[bool, int, float]:
    """Whether the number is the same, how many parts are common, how alike the texts are."""
    others = known.split(":")
    alike = SequenceMatcher(None, ":".join(parts), known).ratio()
    return parts[0] == others[0], len({*parts} & {*others}), alike


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """Storage of keys and values. `token_scales` adds one fp16 scale per token and head."""

    number: Number
    token_scales: bool = False

    @classmethod
    def parse(cls, text: str) -> CacheFormat:
        """Read `bf16`, `fp8`, `fp8:token` or `fp32`."""
        found = _CACHE_FORMATS.get(text.strip().lower())
        if found is None:
            raise ConfigError(
                f"unknown cache format {text!r}; the formats are {', '.join(_CACHE_FORMATS)}"
            )
        return found

    def __str__(self) -> str:
        return f"{self.number}:token" if self.token_scales else str(self.number)

    @property
    def static_scales(self) -> bool:
        """One scale per layer and head, kept beside the pool: from checkpoint, calibration or 1."""
        return self.number is Number.FP8 and not self.token_scales

    def vector_bytes(self, dim: int) -> int:
        """Bytes of one key or value vector of `dim` numbers, its scale included."""
        return dim * self.number.bits // 8 + (SCALE_BYTES if self.token_scales else 0)


_CACHE_FORMATS = {
    str(f): f
    for f in (
        CacheFormat(Number.BF16),
        CacheFormat(Number.FP8),
        CacheFormat(Number.FP8, token_scales=True),
        CacheFormat(Number.FP32),
    )
}

BF16 = WeightFormat(Number.BF16)
FP32 = WeightFormat(Number.FP32)
CACHE_BF16 = CacheFormat(Number.BF16)
CACHE_FP32 = CacheFormat(Number.FP32)


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """Formats of one phase. `weights` None is `auto` (as stored).

    `weights` speaks for every linear layer; `experts` for routed experts and `head` for embedding
    and head, and where they are None these follow `weights`.
    """

    weights: WeightFormat | None = None
    cache: CacheFormat = CACHE_BF16
    head: WeightFormat | None = None
    experts: WeightFormat | None = None

    def __str__(self) -> str:
        weights = str(self.weights or "auto")
        others = {"head": self.head, "experts": self.experts}
        overrides = [f"{key}={fmt}" for key, fmt in others.items() if fmt is not None]
        if not overrides:
            return f"{weights}/{self.cache}"
        return ",".join([f"weights={weights}", f"cache={self.cache}", *overrides])


@dataclass(frozen=True, slots=True)
class PrecisionPlan:
    """Formats of both phases and the page size in tokens."""

    prefill: PhasePlan = PhasePlan()
    decode: PhasePlan = PhasePlan()
    page_size: int = 16

    @classmethod
    def parse(
        cls, plan: str | None = None, prefill: str | None = None, decode: str | None = None
    ) -> PrecisionPlan:
        """Build a plan from texts: `plan` speaks for both phases, the others for one.

        Each text is `weights/cache`, or `weights=…,experts=…,cache=…,head=…,page=…` in any order,
        any part left out; `plan` may be two of them, `PREFILL->DECODE`. A phase's own text wins
        over `plan`. ConfigError names the text and gives a hint.
        """
        shared = _split_phases(plan) if plan else ("", "")
        sides = [
            _parse_phase(text) | _parse_phase(own or "")
            for text, own in zip(shared, (prefill, decode), strict=True)
        ]
        pages = {int(side["page"]) for side in sides if "page" in side}
        if len(pages) > 1:
            raise ConfigError(f"page= must be the same for both phases, not {sorted(pages)}")
        return cls(_phase(sides[0]), _phase(sides[1]), pages.pop() if pages else 16)

    def __str__(self) -> str:
        pair = (
            str(self.prefill) if self.prefill == self.decode else f"{self.prefill} → {self.decode}"
        )
        return f"{pair} page={self.page_size}"

    @property
    def sides(self) -> tuple[PhasePlan, PhasePlan]:
        """Prefill and decode."""
        return self.prefill, self.decode

    def phase(self, phase: Phase) -> PhasePlan:
        return self.prefill if phase is Phase.PREFILL else self.decode


_PLAN_KEYS = ("weights", "experts", "cache", "head", "page")


def _split_phases(plan: str) -> tuple[str, str]:
    prefill, arrow, decode = plan.replace("->", "→").partition("→")
    if not arrow:
        return plan, plan
    if not prefill.strip() or not decode.strip():
        raise ConfigError(f"a phase is missing in the plan {plan!r}; write PREFILL->DECODE")
    return prefill.strip(), decode.strip()


def _parse_phase(text: str) -> dict[str, str]:
    if not text:
        return {}
    if "=" not in text:
        weights, slash, cache = text.partition("/")
        if not slash:
            return {"weights": weights}
        return {"weights": weights, "cache": cache}
    found: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value or key not in _PLAN_KEYS:
            raise ConfigError(f"cannot read {part!r} in the plan {text!r}; {_with_keys(text)}")
        if key in found:
            raise ConfigError(f"duplicate key {key}= in plan {text!r}")
        found[key] = value
    if "page" in found and not (found["page"].isdigit() and int(found["page"]) > 0):
        raise ConfigError(f"page={found['page']} in the plan {text!r} is not a number of tokens")
    return found


def _with_keys(text: str) -> str:
    """How a plan is written that mixes both spellings, `weights/cache` and keys."""
    found = []
    for part in map(str.strip, text.split(",")):
        weights, slash, cache = map(str.strip, part.partition("/"))
        key, equals, _ = (piece.strip() for piece in part.partition("="))
        if (equals and key not in _PLAN_KEYS) or not weights or (slash and not cache):
            return "write weights=…,experts=…,cache=…,head=…,page=…"
        found.append(part if equals else f"weights={weights}" + (slash and f",cache={cache}"))
    return f"with keys, weights and cache have theirs too: {','.join(found)}"


def _phase(side: dict[str, str]) -> PhasePlan:
    weights = side.get("weights", "auto")
    return PhasePlan(
        weights=None if weights == "auto" else WeightFormat.parse(weights),
        cache=CacheFormat.parse(side["cache"]) if "cache" in side else CACHE_BF16,
        head=WeightFormat.parse(side["head"]) if "head" in side else None,
        experts=WeightFormat.parse(side["experts"]) if "experts" in side else None,
    )
