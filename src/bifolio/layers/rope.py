"""Tables of cosines and sines for rotary position embedding, with its scalings for long context."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bifolio.errors import CheckpointError
from bifolio.spec import RopeSpec


def rope_table(rope: RopeSpec, positions: int) -> Tensor:
    """Cosines beside sines of the positions 0 … positions - 1: float32 [positions, rope.dim].

    Computed step by step in float32 as the `transformers` package does, so that logits agree.
    CheckpointError if the rotation's parameters make no finite numbers.
    """
    try:
        inverse, scale = _frequencies(rope)
    except (ArithmeticError, ValueError) as error:
        raise CheckpointError(
            f"the parameters of rotation cannot be used: {error}: {rope}"
        ) from error
    if not (bool(inverse.isfinite().all()) and math.isfinite(scale)):
        raise CheckpointError(f"the parameters of rotation make no finite numbers: {rope}")
    angle = torch.arange(positions, dtype=torch.float32)[:, None] * inverse
    return torch.cat((angle.cos() * scale, angle.sin() * scale), dim=-1)


def _frequencies(rope: RopeSpec) -> tuple[Tensor, float]:
    """Angle per position of each pair, float32 [dim / 2], and the factor on cosines and sines."""
    periods = rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    match rope.kind:
        case "default":
            return 1.0 / periods, 1.0
        case "factors":
            return 1.0 / periods / torch.tensor(rope.factors, dtype=torch.float32), 1.0
        case "llama3":
            return _llama3(rope, 1.0 / periods), 1.0
        case "yarn":
            return _yarn(rope, periods), _yarn_attention_factor(rope)
        case _:
            raise AssertionError(f"unknown rope kind {rope.kind}")


def _llama3(rope: RopeSpec, inverse: Tensor) -> Tensor:
    """Llama 3.1: slow pairs are slowed by `factor`, fast ones kept, those between blended."""
    original = rope.original_max_position
    wavelength = 2 * math.pi / inverse
    slow = wavelength > original / rope.low_freq_factor
    fast = wavelength < original / rope.high_freq_factor
    slowed = torch.where(slow, inverse / rope.factor, inverse)
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = (original / wavelength - rope.low_freq_factor) / span
    blended = (1 - keep) * slowed / rope.factor + keep * slowed
    return torch.where(slow | fast, slowed, blended)


def _yarn(rope: RopeSpec, periods: Tensor) -> Tensor:
    """YaRN (Peng et al. 2023): pairs that turn often are kept, those that turn little slowed."""

    def pair_that_turns(turns: float) -> float:
        turned = rope.original_max_position / (turns * 2 * math.pi)
        return rope.dim * math.log(turned) / (2 * math.log(rope.theta))

    first, last = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    if first == last:
        last += 0.001
    ramp = (torch.arange(rope.dim // 2, dtype=torch.float32) - first) / (last - first)
    keep = 1 - ramp.clamp(0, 1)
    return 1.0 / (rope.factor * periods) * (1 - keep) + 1.0 / periods * keep


def _yarn_attention_factor(rope: RopeSpec) -> float:
    """The factor on q·k that YaRN recommends, as a factor on each of q and k."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    if rope.mscale and rope.mscale_all_dim:
        return _magnitude(rope, rope.mscale) / _magnitude(rope, rope.mscale_all_dim)
    return _magnitude(rope, 1.0)


def yarn_softmax_factor(rope: RopeSpec) -> float:
    """What latent attention multiplies its scores by: the other part of YaRN's correction.

    DeepSeek splits it: `mscale_all_dim` acts on the scores, which have unrotated parts too, and
    `mscale / mscale_all_dim` on cosines and sines.
    """
    if rope.kind != "yarn" or not rope.mscale_all_dim:
        return 1.0
    return _magnitude(rope, rope.mscale_all_dim) ** 2


def _magnitude(rope: RopeSpec, weight: float) -> float:
    return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
