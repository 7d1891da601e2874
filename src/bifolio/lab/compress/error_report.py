"""What compression did: bytes by kind of tensor, and the error of each layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bifolio.lab.compress.catalogue import Entry
from bifolio.lab.compress.recipe import Recipe
from bifolio.lab.compress.shard_layout import Shard


@dataclass(frozen=True, slots=True)
class MatrixError:
    """What a matrix lost. `worst` is the greatest relative error of a row, an output channel.

    `output` is ‖(W - Ŵ) X‖ / ‖W X‖ over the calibration inputs X; `note` says why a matrix was not
    treated by the method that was asked for.
    """

    name: str
    kind: str
    layer: int | None
    error_square: float
    square: float
    worst: float
    worst_channel: int
    output: float | None = None
    note: str | None = None

    @classmethod
    def of(
        cls,
        name: str,
        kind: str,
        layer: int | None,
        w_nk: Tensor,
        coded_nk: Tensor,
        gram_kk: Tensor | None = None,
        note: str | None = None,
    ) -> MatrixError:
        """Compare a matrix with what its codes mean. `gram_kk` is Xᵀ X of its inputs."""
        error = coded_nk - w_nk
        error_n, square_n = error.square().sum(dim=1), w_nk.square().sum(dim=1)
        relative = torch.where(square_n > 0, (error_n / square_n).sqrt(), 0.0)
        channel = int(relative.argmax())
        output = None
        if gram_kk is not None:
            whole = float((w_nk @ gram_kk * w_nk).sum())
            lost = float((error @ gram_kk * error).sum())
            output = max(lost / whole, 0.0) ** 0.5 if whole > 0 else None
        return cls(
            name=name,
            kind=kind,
            layer=layer,
            error_square=float(error_n.sum()),
            square=float(square_n.sum()),
            worst=float(relative[channel]),
            worst_channel=channel,
            output=output,
            note=note,
        )


@dataclass(frozen=True, slots=True)
class LayerError:
    """The matrices of a layer together. `frobenius` is ‖W - Ŵ‖ / ‖W‖ over all of them."""

    layer: int | None
    matrices: int
    frobenius: float
    worst: float
    worst_at: str
    """Module and output channel."""
    output: float | None
    """Mean over its matrices."""


@dataclass(frozen=True, slots=True)
class KindBytes:
    """Bytes of a kind of tensors before and after."""

    kind: str
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class OutputDistance:
    """How far the result's output distributions are from the source's, on text that was held out.

    Divergences KL(source ‖ result) in nats; `top1` is the share of positions where both prefer the
    same token.
    """

    positions: int
    kl: float
    kl_p99: float
    top1: float


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """All of it. Bytes are those of tensors; `file_bytes` those of files, headers included."""

    recipe: str
    bytes_before: int
    bytes_after: int
    file_bytes: int
    kinds: tuple[KindBytes, ...]
    layers: tuple[LayerError, ...]
    notes: tuple[str, ...]
    distance: OutputDistance | None = None

    @property
    def ratio(self) -> float:
        return self.bytes_after / self.bytes_before

    def as_json(self) -> dict[str, Any]:
        """For `json.dumps`."""
        return asdict(self) | {"ratio": self.ratio}


def layer_errors(errors: Iterable[MatrixError]) -> tuple[LayerError, ...]:
    """Matrices by layer, in order."""
    by_layer: dict[int | None, list[MatrixError]] = {}
    for error in errors:
        by_layer.setdefault(error.layer, []).append(error)
    return tuple(_together(layer, members) for layer, members in by_layer.items())


def _together(layer: int | None, members: list[MatrixError]) -> LayerError:
    square = sum(one.square for one in members)
    worst = max(members, key=lambda one: one.worst)
    outputs = [one.output for one in members if one.output is not None]
    return LayerError(
        layer=layer,
        matrices=len(members),
        frobenius=(sum(one.error_square for one in members) / square) ** 0.5 if square else 0.0,
        worst=worst.worst,
        worst_at=f"{worst.name}[{worst.worst_channel}]",
        output=sum(outputs) / len(outputs) if outputs else None,
    )


def bytes_by_kind(before: Mapping[str, int], shards: Iterable[Shard]) -> tuple[KindBytes, ...]:
    """`before` are bytes by kind; those after are as laid out."""
    after: dict[str, int] = {}
    for shard in shards:
        for unit in shard.units:
            for piece in unit.pieces:
                after[piece.kind] = after.get(piece.kind, 0) + piece.nbytes
    return tuple(KindBytes(kind, before.get(kind, 0), nbytes) for kind, nbytes in after.items())


def kept_layers(entries: Iterable[Entry], recipe: Recipe) -> Iterator[str]:
    """How many linear layers stay as they are, and why."""
    reasons = Counter(recipe.why_kept(entry) for entry in entries if entry.linear)
    for why, count in reasons.items():
        if why is not None:
            yield f"{count} linear layers kept: {why}"
