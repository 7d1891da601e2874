"""The parts of a model that not every family has: latent attention, experts, sparse attention."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2): all heads share one latent per token.

    A token's cache record is `kv_lora` numbers, the latent after its norm, and `rope` numbers, the
    rotated part of the key that all heads share. Keys of a head are `nope` numbers expanded from
    the latent and those `rope` numbers; its values are `v` numbers expanded from the latent.
    `q_lora` is the rank through which queries are made, None where they come straight from the
    hidden state. `rope_interleaved`: pairs that rotate together are neighbours (0, 1), (2, 3), …
    in the checkpoint, else halves (0, rope / 2), ….
    """

    q_lora: int | None
    kv_lora: int
    nope: int
    rope: int
    v: int
    rope_interleaved: bool = True

    @property
    def record(self) -> int:
        """Numbers that a token keeps in the cache of one layer."""
        return self.kv_lora + self.rope

    @property
    def qk(self) -> int:
        """Numbers of one query or key head."""
        return self.nope + self.rope


class Scoring(StrEnum):
    """How router logits become the scores of experts."""

    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How a token's experts are chosen and weighed; everything in fp32.

    With `correction_bias` a bias per expert is added for the choice, not for the weights. With
    `groups` above 1 the experts stand in that many groups, of which the `top_groups` best (by the
    sum of their `group_best` best biased scores) may be chosen from. `normalize` divides
    the weights of the chosen by their sum; then all are multiplied by `scale`.
    """

    scoring: Scoring
    correction_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    normalize: bool = True
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class MoESpec:
    """A mixture of SwiGLU experts in every layer from `first_dense` on; below, MLPs are dense.

    Each token goes through `top_k` of `routed` experts of width `intermediate`, and through one
    MLP of width `shared * intermediate`, where `shared` is not 0.
    """

    routed: int
    top_k: int
    shared: int
    intermediate: int
    router: RouterSpec
    first_dense: int = 0

    @property
    def shared_intermediate(self) -> int:
        return self.shared * self.intermediate


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """The lightning indexer of sparse attention (DeepSeek-V3.2, GLM-5).

    In a layer that owns an index, `heads` query heads of `dim` numbers score all earlier tokens
    by their index keys (`dim` numbers a token, one head); attention then sees the `top_k` best.
    `owners` are those layers, in order; every other layer uses the choice of the owner before it.
    """

    heads: int
    dim: int
    top_k: int
    owners: tuple[int, ...]
    rope_interleaved: bool = True

    def owns(self, layer: int) -> bool:
        return layer in self.owners

    def source(self, layer: int) -> int:
        """The layer whose choice of tokens `layer` uses."""
        return max(owner for owner in self.owners if owner <= layer)
