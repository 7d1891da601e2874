"""Linear layers with many weights, of which each row meets one: experts, or heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from bifolio.kernels.ops import Groups, Norm, Weight


class GroupedOps(ABC):
    """The part of a kernel set that groups rows, made of its own `linear`."""

    @abstractmethod
    def linear(
        self,
        x_tk: Tensor,
        weight: Weight,
        *,
        norm: Norm | None = None,
        residual_tn: Tensor | None = None,
    ) -> Tensor:
        """See `Ops.linear`."""

    def grouped_linear(
        self,
        x_sk: Tensor,
        weights: Sequence[Weight],
        groups: Groups,
        *,
        norm: Norm | None = None,
    ) -> Tensor:
        """See `Ops.grouped_linear`. Rows of a group lie together, so no row is copied for it."""
        return torch.cat(
            [
                self.linear(x_sk[start:end], weights[member], norm=norm)
                for member, (start, end) in zip(
                    groups.members, pairwise(groups.borders), strict=True
                )
            ]
        )
