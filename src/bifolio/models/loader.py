"""Checkpoint → models ready to run: one for each distinct precision of the plan's two phases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bifolio.errors import CheckpointError, UnsupportedError
from bifolio.formats import BF16, Number, Phase, PhasePlan, PrecisionPlan, WeightFormat
from bifolio.kernels.decode import decode
from bifolio.kernels.ops import Batch, LayerCache, Norm, Ops, Weight
from bifolio.kernels.tensor import QuantTensor
from bifolio.layers.attention import Attention
from bifolio.layers.decoder import Decoder, DecoderLayer
from bifolio.layers.mlp import GatedMLP
from bifolio.layers.rope import rope_table
from bifolio.models.checkpoint import Checkpoint, check_tensors, identity
from bifolio.models.families import FAMILIES
from bifolio.models.gguf_model import GGUFCheckpoint
from bifolio.models.precision import as_stored, convert, stack
from bifolio.models.shards import SafetensorsFolder
from bifolio.models.source import ModelSource
from bifolio.models.tensors import Gain, LayerTensors, Matrix, ModelTensors
from bifolio.spec import ModelSpec

Progress = Callable[[int, int], None]
"""Called with the number of weights taken in and their total."""


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder with the kernels it runs on."""

    spec: ModelSpec
    ops: Ops
    decoder: Decoder

    def forward(self, batch: Batch, caches: list[LayerCache]) -> Tensor:
        """Run a batch over the cache: logits float32 [l, vocab], l as in `batch.logits_index_l`."""
        return self.decoder(self.ops, batch, caches)


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """A model for each phase; the same object twice where the plan makes no difference."""

    spec: ModelSpec
    prefill: Model
    decode: Model
    identity: str
    """Digest that tells these weights from others, whatever formats they are kept in."""
    nbytes: int
    """Bytes of all weights, each counted once."""

    def phase(self, phase: Phase) -> Model:
        return self.prefill if phase is Phase.PREFILL else self.decode


def load_models(
    source: ModelSource,
    plan: PrecisionPlan,
    ops: Ops,
    *,
    positions: int | None = None,
    auto: Callable[[WeightFormat], WeightFormat] = as_stored,
    progress: Progress = lambda _done, _total: None,
) -> LoadedModels:
    """Take in the weights of both phases, one after the other, weight by weight.

    `positions` bounds the positions that will be used (None: all that the model knows). `auto`
    gives the format for `weights=auto`, from the stored one. CheckpointError names tensors that
    are missing, left over or misshapen; UnsupportedError a format that `ops` has no kernel for.
    """
    spec = source.spec
    tensors, checkpoint = FAMILIES[spec.architecture](spec), _open(source)
    check_tensors(tensors, checkpoint)
    phases = list(dict.fromkeys(_weights_only(side) for side in (plan.prefill, plan.decode)))
    reader = _Reader(checkpoint, ops, auto, progress, len(list(tensors.all())) * len(phases))
    reader.check_tied(tensors)
    cos_sin = rope_table(spec.rope, min(positions or spec.max_position, spec.max_position))
    models = {
        side: Model(spec, ops, _build(spec, tensors, reader, side, cos_sin)) for side in phases
    }
    return LoadedModels(
        spec=spec,
        prefill=models[_weights_only(plan.prefill)],
        decode=models[_weights_only(plan.decode)],
        identity=identity(spec, checkpoint),
        nbytes=reader.nbytes + cos_sin.nbytes,
    )


def _open(source: ModelSource) -> Checkpoint:
    return (
        GGUFCheckpoint(source.gguf, source.spec)
        if source.is_gguf
        else SafetensorsFolder(source.path)
    )


def _weights_only(side: PhasePlan) -> PhasePlan:
    """What of a phase's plan decides its weights: the cache does not."""
    return PhasePlan(weights=side.weights, head=side.head or side.weights)


def _build(
    spec: ModelSpec, tensors: ModelTensors, reader: _Reader, side: PhasePlan, cos_sin_pd: Tensor
) -> Decoder:
    embedding = reader.matrix(tensors.embedding, side.head)
    layers = tuple(
        _layer(spec, layer, reader, side, window)
        for layer, window in zip(tensors.layers, spec.windows, strict=True)
    )
    norm = reader.norm(tensors.norm, spec.rms_eps)
    head = embedding if tensors.tied else reader.matrix(tensors.head, side.head)
    return Decoder(embedding, layers, norm, head, cos_sin_pd)


def _layer(
    spec: ModelSpec, layer: LayerTensors, reader: _Reader, side: PhasePlan, window: int | None
) -> DecoderLayer:
    eps, wish = spec.rms_eps, side.weights
    return DecoderLayer(
        Attention(
            norm=reader.norm(layer.attention_norm, eps),
            qkv=reader.matrix(layer.qkv, wish),
            output=reader.matrix(layer.output, wish),
            heads=spec.heads,
            scale=spec.head_dim**-0.5,
            window=window,
            q_norm=None if layer.q_norm is None else reader.norm(layer.q_norm, eps),
            k_norm=None if layer.k_norm is None else reader.norm(layer.k_norm, eps),
        ),
        GatedMLP(
            norm=reader.norm(layer.mlp_norm, eps),
            gate_up=reader.matrix(layer.gate_up, wish),
            down=reader.matrix(layer.down, wish),
        ),
    )


class _Reader:
    """Reads, converts and prepares weights; the same weight in the same format only once."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        ops: Ops,
        auto: Callable[[WeightFormat], WeightFormat],
        progress: Progress,
        total: int,
    ) -> None:
        self._checkpoint = checkpoint
        self._ops = ops
        self._auto = auto
        self._progress = progress
        self._done, self._total = 0, total
        self._matrices: dict[tuple[Matrix, WeightFormat | None], Weight] = {}
        self._gains: dict[Gain, Tensor] = {}

    @property
    def nbytes(self) -> int:
        gains = sum(gain.nbytes for gain in self._gains.values())
        return gains + sum(weight.nbytes for weight in self._matrices.values())

    def norm(self, gain: Gain, eps: float) -> Norm:
        if gain not in self._gains:
            self._gains[gain] = self._checkpoint.vector(f"{gain.part}.weight")
        self._step()
        return Norm(self._gains[gain], eps)

    def matrix(self, matrix: Matrix, wish: WeightFormat | None) -> Weight:
        """The weight in the format `wish`; None is the policy for the format it is stored in."""
        key = (matrix, wish)
        if key not in self._matrices:
            self._matrices[key] = self._prepare(matrix, wish)
        self._step()
        return self._matrices[key]

    def check_tied(self, tensors: ModelTensors) -> None:
        """A head stored beside tied embeddings must be equal to them."""
        for name, _ in tensors.head.shapes() if tensors.tied else ():
            if name in self._checkpoint.shapes:
                table = self._checkpoint.matrix(next(tensors.embedding.shapes())[0])
                if not torch.equal(decode(self._checkpoint.matrix(name)), decode(table)):
                    raise CheckpointError(
                        f"{name} differs from the embeddings, although they are tied by "
                        "tie_word_embeddings"
                    )

    def _prepare(self, matrix: Matrix, wish: WeightFormat | None) -> Weight:
        names = [part for part, _ in matrix.parts]
        stored = stack([self._checkpoint.matrix(f"{name}.weight") for name in names])
        bias = None
        if matrix.bias:
            bias = torch.cat([self._checkpoint.vector(f"{name}.bias") for name in names])
        try:
            return self._take_in(stored, bias, wish)
        except CheckpointError as error:
            raise CheckpointError(f"{', '.join(names)}: {error}") from error

    def _take_in(
        self, stored: QuantTensor, bias_n: Tensor | None, wish: WeightFormat | None
    ) -> Weight:
        if wish is not None:
            return self._ops.prepare(convert(stored, wish), bias_n)
        try:
            return self._ops.prepare(convert(stored, self._auto(stored.format)), bias_n)
        except UnsupportedError:
            if stored.format.number in (Number.BF16, Number.FP32):
                raise
            return self._ops.prepare(convert(stored, BF16), bias_n)

    def _step(self) -> None:
        self._done += 1
        self._progress(self._done, self._total)
