"""How long to wait, and how often to try again."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. A peer that dies is noticed at once by its transport; these are for one that hangs.

    `silence` must be longer than the longest step of an engine, since its loop sends the beats.
    """

    connect: float = 10.0
    """From the opening of a connection until both sides are ready."""
    beat: float = 0.5
    """Between two signs of life."""
    silence: float = 20.0
    """Without any message, until the connection is closed."""
    gap: float = 2.0
    """While a later message is there and an earlier one is not, until the connection is closed."""
    stall: float = 10.0
    """Without progress of a transfer that waits for nothing of the peer's own, until it ends."""


class RetryBudget:
    """Bounds tries again: per request, and in all to a share of what succeeds.

    A try costs one unit, a success brings `share` back, `reserve` is where the account starts and
    ends, so a peer that fails everything is soon left alone. Delays double from `base` to `cap`
    and are drawn from the upper half, so that those who failed together do not return together.
    """

    def __init__(
        self,
        attempts: int = 3,
        *,
        share: float = 0.1,
        reserve: float = 10.0,
        base: float = 0.05,
        cap: float = 2.0,
        seed: int | None = None,
    ) -> None:
        self.attempts = attempts
        self._share = share
        self._reserve = self._left = reserve
        self._base = base
        self._cap = cap
        self._random = random.Random(seed)

    def succeeded(self) -> None:
        """A hand-off was admitted."""
        self._left = min(self._reserve, self._left + self._share)

    def delay(self, attempt: int) -> float | None:
        """Seconds to wait after the failure of try `attempt` (from 1 on); None: give up."""
        if attempt >= self.attempts or self._left < 1:
            return None
        self._left -= 1
        longest: float = min(self._cap, self._base * 2 ** (attempt - 1))
        return longest * self._random.uniform(0.5, 1.0)
