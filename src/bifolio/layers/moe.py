"""Mixture of experts: each token goes through the few experts that a router chooses for it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from bifolio.kernels.ops import Groups, Norm, Ops, Weight
from bifolio.layers.mlp import GatedMLP
from bifolio.spec import RouterSpec, Scoring

_NO_DIVISION_BY_ZERO = 1e-20


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses `top_k` experts for each token and weighs them, all in float32.

    The rules are those of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) for sigmoid scores and of
    DeepSeek-V2 and Qwen3 for softmax, step by step as the `transformers` package computes them.
    Experts come in the order of their scores, equal ones by their number, so that a token's choice
    and the order of its sum depend on the token alone.
    """

    weight: Weight
    """float32 [experts, h], in every plan."""
    bias_e: Tensor | None
    """Correction in float32, added to the scores for the choice only."""
    spec: RouterSpec
    top_k: int

    def __call__(self, ops: Ops, x_th: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Experts int64 [t, top_k] and their weights float32 [t, top_k]."""
        return self.choose(ops.linear(x_th, self.weight, norm=norm))

    def choose(self, logits_te: Tensor) -> tuple[Tensor, Tensor]:
        """The same from the logits of all experts."""
        spec = self.spec
        if spec.scoring is Scoring.SIGMOID:
            # Through float64, because torch computes the tail of a tensor by another exp, and the
            # place of a token in the batch must not decide its bits.
            scores_te = logits_te.to(torch.float64).sigmoid().to(torch.float32)
        else:
            scores_te = logits_te.softmax(dim=-1)
        wanted_te = scores_te if self.bias_e is None else scores_te + self.bias_e
        if spec.groups > 1:
            wanted_te = self._best_groups(wanted_te)
        chosen_tr = _best(wanted_te, self.top_k)
        weights_tr = scores_te.gather(1, chosen_tr)
        if spec.normalize:
            total_t = sum(
                weights_tr.unbind(1), torch.tensor(_NO_DIVISION_BY_ZERO)
            )  # in order of rank
            weights_tr = weights_tr / total_t[:, None]
        return chosen_tr, weights_tr * spec.scale

    def _best_groups(self, wanted_te: Tensor) -> Tensor:
        """-inf for experts outside the `top_groups` groups whose few best sum to most."""
        by_group = wanted_te.view(wanted_te.shape[0], self.spec.groups, -1)
        chosen = _best(
            by_group.topk(self.spec.group_best, dim=-1).values.sum(dim=-1), self.spec.top_groups
        )
        left_out = torch.ones(by_group.shape[:2], dtype=torch.bool).scatter(1, chosen, False)
        return by_group.masked_fill(left_out[..., None], -torch.inf).flatten(1)


@dataclass(frozen=True, slots=True)
class MoE:
    """x + shared(norm(x)) + Σ weight · expert(norm(x)) over the chosen experts, in their order."""

    norm: Norm
    router: Router
    gate_up: tuple[Weight, ...]
    """Gate and up of each expert in one gated matrix [2 * intermediate, h]."""
    down: tuple[Weight, ...]
    shared: GatedMLP | None
    """What every token goes through, with the same norm."""

    def __call__(self, ops: Ops, x_th: Tensor) -> Tensor:
        """Float32 [t, h]. Only the weights of chosen experts are read."""
        chosen_tr, weights_tr = self.router(ops, x_th, self.norm)
        groups, order_s = _by_expert(chosen_tr)
        top_k = self.router.top_k
        x_sh = ops.gather(x_th, (order_s // top_k).to(torch.int32))
        hidden = ops.grouped_linear(x_sh, self.gate_up, groups, norm=self.norm)
        out_sh = ops.grouped_linear(hidden, self.down, groups)
        place_tr = order_s.argsort().view(-1, top_k)
        y_th = x_th if self.shared is None else self.shared(ops, x_th)
        for rank in range(top_k):
            y_th = y_th + weights_tr[:, rank, None] * out_sh[place_tr[:, rank]]
        return y_th


def _best(scores: Tensor, count: int) -> Tensor:
    """Places of the `count` greatest in each row, the greatest first, equal ones by place."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _by_expert(chosen_tr: Tensor) -> tuple[Groups, Tensor]:
    """The groups of all (token, rank) pairs by expert, and the pairs in that order, int64 [s]."""
    expert_s = chosen_tr.flatten()
    counts = expert_s.bincount().tolist()
    members = [expert for expert, count in enumerate(counts) if count]
    borders = accumulate((counts[expert] for expert in members), initial=0)
    return Groups(tuple(members), tuple(borders)), expert_s.argsort(stable=True)
