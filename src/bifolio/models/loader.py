"""Checkpoint → models ready to run: one for each distinct precision of the plan's two phases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from bifolio.formats import Phase, PhasePlan, PrecisionPlan, WeightFormat
from bifolio.kernels.ops import Batch, LayerCache, Ops
from bifolio.layers.decoder import Decoder
from bifolio.layers.rope import rope_table
from bifolio.models.build import build_decoder
from bifolio.models.checkpoint import Checkpoint, RawTensors, check_tensors, identity
from bifolio.models.families import FAMILIES
from bifolio.models.gguf_model import GGUFCheckpoint
from bifolio.models.precision import as_stored
from bifolio.models.quantization import read_quantization
from bifolio.models.reader import Progress, WeightReader
from bifolio.models.shards import SafetensorsFolder
from bifolio.models.source import ModelSource
from bifolio.models.stored import StoredWeights
from bifolio.models.views import GateAndUp, plain_view
from bifolio.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder with the kernels it runs on."""

    spec: ModelSpec
    ops: Ops
    decoder: Decoder

    @property
    def recordable(self) -> bool:
        """Whether a pass of the same shapes makes the same kernel calls, whatever its tokens."""
        return self.spec.moe is None and self.spec.mla is None

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
    tensors = FAMILIES[spec.architecture](spec)
    checkpoint, files = _open(source)
    check_tensors(tensors, checkpoint)
    phases = list(dict.fromkeys(_weights_only(side) for side in (plan.prefill, plan.decode)))
    reader = WeightReader(checkpoint, ops, auto, progress, len(list(tensors.all())) * len(phases))
    reader.check_tied(tensors)
    cos_sin = rope_table(spec.rope, min(positions or spec.max_position, spec.max_position))
    models = {
        side: Model(spec, ops, build_decoder(spec, tensors, reader, side, cos_sin))
        for side in phases
    }
    return LoadedModels(
        spec=spec,
        prefill=models[_weights_only(plan.prefill)],
        decode=models[_weights_only(plan.decode)],
        identity=identity(spec, files),
        nbytes=reader.nbytes + cos_sin.nbytes,
    )


def _open(source: ModelSource) -> tuple[Checkpoint, RawTensors]:
    """The numbers of a checkpoint, and the bytes of its files."""
    if source.is_gguf:
        checkpoint = GGUFCheckpoint(source.gguf, source.spec)
        return checkpoint, checkpoint
    form = read_quantization(source.config)
    files = SafetensorsFolder(source.path)
    return GateAndUp(StoredWeights(plain_view(files, source.spec), form)), files


def _weights_only(side: PhasePlan) -> PhasePlan:
    """What of a phase's plan decides its weights: the cache does not."""
    return PhasePlan(weights=side.weights, head=side.head or side.weights)
