"""Checkpoint → models ready to run: one for each distinct precision of the plan's two phases."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from bifolio.checkpoint.build import build_decoder
from bifolio.checkpoint.checkpoint import Checkpoint, check_tensors, identity
from bifolio.checkpoint.expert_files import ExpertFiles
from bifolio.checkpoint.gguf_model import GGUFCheckpoint
from bifolio.checkpoint.open import open_checkpoint
from bifolio.checkpoint.source import ModelSource
from bifolio.checkpoint.weight_reader import Progress, WeightReader
from bifolio.errors import ConfigError
from bifolio.formats import Phase, PhasePlan, PrecisionPlan, WeightFormat
from bifolio.input_files import visible
from bifolio.kernels.cache_scales import CacheScales
from bifolio.kernels.huge_pages import returning_freed_memory
from bifolio.kernels.native import NativeOps
from bifolio.kernels.ops import Batch, LayerCache, Ops
from bifolio.layers.decoder import Decoder
from bifolio.layers.rope import rope_table
from bifolio.spec import ModelSpec
from bifolio.spec.families.registry import FAMILIES
from bifolio.spec.weights import FormatRule, ModelTensors, WeightMatrix


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder with the kernels it runs on."""

    spec: ModelSpec
    ops: Ops
    decoder: Decoder

    @property
    def recordable(self) -> bool:
        """Whether a pass of the same shapes makes the same kernel calls for all tokens."""
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
    """Digest that tells these weights from others, independent of the formats they are kept in."""
    nbytes: int
    """Bytes of all weights that are kept in memory, each counted once."""
    experts: ExpertFiles | None = None
    """Those that are mapped from files instead."""
    cache_scales: CacheScales | None = None
    """Static scales that the checkpoint brings for an fp8 cache."""
    widened: tuple[str, ...] = ()
    """Quantised types of a GGUF file that became bf16, for want of a format that holds them."""

    def phase(self, phase: Phase) -> Model:
        return self.prefill if phase is Phase.PREFILL else self.decode


def load_models(
    source: ModelSource,
    plan: PrecisionPlan,
    ops: Ops,
    *,
    positions: int | None = None,
    experts: Path | None = None,
    expert_memory: int = 0,
    progress: Progress = lambda _done, _total: None,
) -> LoadedModels:
    """Take in the weights of both phases, one after the other, weight by weight.

    `positions` bounds the positions that will be used (None: all that the model knows). With
    `experts`, a folder, experts are packed into files in it, once, and mapped from there;
    `expert_memory` bounds the bytes of them in memory (0: the system decides). CheckpointError
    names tensors that are missing, left over or misshapen; UnsupportedError a format that `ops`
    has no kernel for.
    """
    spec = source.spec
    tensors = FAMILIES[spec.architecture](spec)
    checkpoint, files, scales = open_checkpoint(source, tensors)
    check_tensors(tensors, checkpoint)
    phases = list(dict.fromkeys(_weights_only(side) for side in (plan.prefill, plan.decode)))
    name = identity(spec, files)
    mapped = None if experts is None else _mapped(experts, source, name, ops, expert_memory)
    total = len(list(tensors.all())) * len(phases)
    reader = WeightReader(checkpoint, ops, _auto, progress, total, mapped)
    reader.check_tied(tensors)
    cos_sin = rope_table(spec.rope, min(positions or spec.max_position, spec.max_position))
    with returning_freed_memory():
        models = {
            side: Model(spec, ops, build_decoder(spec, tensors, reader, side, cos_sin))
            for side in phases
        }
    return LoadedModels(
        spec=spec,
        prefill=models[_weights_only(plan.prefill)],
        decode=models[_weights_only(plan.decode)],
        identity=name,
        nbytes=reader.nbytes + cos_sin.nbytes,
        experts=mapped,
        cache_scales=scales,
        widened=_widened(checkpoint, tensors, plan),
    )


def _auto(stored: WeightFormat) -> WeightFormat:
    return FormatRule.PLANNED.resident_format(stored, None)


def _widened(checkpoint: Checkpoint, tensors: ModelTensors, plan: PrecisionPlan) -> tuple[str, ...]:
    automatic = [side for side in plan.sides if side.weights is None]
    if not isinstance(checkpoint, GGUFCheckpoint) or not automatic:
        return ()
    matrices = [item for item in tensors.all() if isinstance(item, WeightMatrix)]
    if all(side.head is not None for side in automatic):
        matrices = [item for item in matrices if item not in (tensors.embedding, tensors.head)]
    return checkpoint.widened(matrices)


def _mapped(folder: Path, source: ModelSource, name: str, ops: Ops, memory: int) -> ExpertFiles:
    if not isinstance(ops, NativeOps):
        raise ConfigError("experts=mapped needs the native kernels; leave kernels=reference out")
    if source.spec.moe is None:
        raise ConfigError(f"experts=mapped: {source.name} has no experts; leave it out")
    files = visible(source.path, "*.safetensors")
    return ExpertFiles(folder, name, files, ops, memory)


def _weights_only(side: PhasePlan) -> PhasePlan:
    """What of a phase's plan decides its weights: the cache does not."""
    return PhasePlan(
        weights=side.weights,
        head=side.head or side.weights,
        experts=side.experts or side.weights,
    )
