"""What is to be made of a checkpoint: format, method, and which of its linear layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from bifolio.errors import ConfigError
from bifolio.formats import Number, WeightFormat
from bifolio.lab.compress.catalogue import Entry
from bifolio.spec.weights import Kind


class Method(StrEnum):
    """How codes are chosen: `rtn` alone needs no calibration."""

    RTN = "rtn"
    GPTQ = "gptq"
    AWQ = "awq"


class CompressedPart(StrEnum):
    """A part of the model to which compression can be limited."""

    EXPERTS = "experts"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Linear layers become `weights`, except where `only` or `keep` says otherwise.

    `keep` are patterns as in a shell (`*.down_proj`, `model.layers.0.*`) over names of modules.
    """

    weights: WeightFormat
    method: Method = Method.RTN
    only: CompressedPart | None = None
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        fmt = self.weights
        if fmt.number in (Number.BF16, Number.FP32):
            raise ConfigError(f"--weights {fmt} compresses nothing; take int4, int8 or fp8")
        if fmt.int8_activations:
            raise ConfigError(
                f"--weights {fmt}: a checkpoint holds weights; leave :a8 out here and say it when "
                "serving"
            )
        if self.method is not Method.RTN and fmt.number is Number.FP8:
            raise ConfigError(f"--method {self.method} is for integers; {fmt} needs --method rtn")

    def __str__(self) -> str:
        parts = [f"weights={self.weights}", f"method={self.method}"]
        parts += [f"only={self.only}"] if self.only else []
        return " ".join([*parts, *(f"keep={pattern}" for pattern in self.keep)])

    def check(self, entries: Iterable[Entry]) -> None:
        """ConfigError for a pattern of `keep` that names nothing of the model: it is misspelt."""
        parts = {entry.part for entry in entries}
        for pattern in self.keep:
            if not any(fnmatchcase(part, pattern) for part in parts):
                raise ConfigError(
                    f"--keep {pattern!r} matches no module of the model; modules are named like "
                    f"{min(parts, key=len)!r} and {max(parts, key=len)!r}"
                )

    def compresses(self, entry: Entry) -> bool:
        """Whether this tensor becomes codes."""
        return entry.linear and self.why_kept(entry) is None

    def why_kept(self, entry: Entry) -> str | None:
        """Why a linear layer stays as it is; None if it does not."""
        if self.only is CompressedPart.EXPERTS and entry.kind is not Kind.ROUTED_EXPERTS:
            return "--only experts"
        for pattern in self.keep:
            if fnmatchcase(entry.part, pattern):
                return f"--keep {pattern}"
        k = entry.shape[1]
        if self.weights.group and k % self.weights.group:
            return f"its {k} inputs are no multiple of {self.weights.group}"
        return None
