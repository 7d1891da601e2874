"""Lengths of prompts and answers: one number, or a distribution, as one text."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass
from enum import StrEnum

from bifolio.errors import ConfigError


class Shape(StrEnum):
    """How lengths are spread."""

    FIXED = "fixed"
    UNIFORM = "uniform"
    NORMAL = "normal"
    LOGNORMAL = "lognormal"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens, at least 1.

    `first` and `second` are the bounds of a uniform distribution, both included, or the mean and
    the standard deviation of the lengths themselves.
    """

    shape: Shape
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str | int) -> Lengths:
        """Read `512`, `100..500`, `normal:512:64` or `lognormal:512:300`."""
        text = str(text).replace(",", "").replace("_", "")
        if match := re.fullmatch(r"(\d+)", text):
            made = cls(Shape.FIXED, int(match[1]))
        elif match := re.fullmatch(r"(\d+)\.\.(\d+)", text):
            made = cls(Shape.UNIFORM, int(match[1]), int(match[2]))
        elif match := re.fullmatch(r"(normal|lognormal):(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)", text):
            made = cls(Shape(match[1]), float(match[2]), float(match[3]))
        else:
            raise ConfigError(
                f"cannot read {text!r} as a length; write 512, 100..500, normal:512:64 or "
                "lognormal:512:300 (mean and standard deviation)"
            )
        if made.first < 1 or (made.shape is Shape.UNIFORM and made.second < made.first):
            raise ConfigError(
                f"the length {text!r} must be at least 1, and a range must not end before it begins"
            )
        return made

    def draw(self, rng: random.Random) -> int:
        """One length."""
        match self.shape:
            case Shape.FIXED:
                return int(self.first)
            case Shape.UNIFORM:
                return rng.randint(int(self.first), int(self.second))
            case Shape.NORMAL:
                return max(1, round(rng.gauss(self.first, self.second)))
            case Shape.LOGNORMAL:
                # The logarithm's variance that gives the lengths this mean and deviation.
                variance = math.log1p((self.second / self.first) ** 2)
                mu = math.log(self.first) - variance / 2
                return max(1, round(rng.lognormvariate(mu, math.sqrt(variance))))

    @property
    def mean(self) -> float:
        """Tokens on average, the cut at 1 left aside."""
        if self.shape is Shape.UNIFORM:
            return (self.first + self.second) / 2
        return self.first

    def __str__(self) -> str:
        match self.shape:
            case Shape.FIXED:
                return f"{self.first:g}"
            case Shape.UNIFORM:
                return f"{self.first:g}..{self.second:g}"
            case _:
                return f"{self.shape}:{self.first:g}:{self.second:g}"
