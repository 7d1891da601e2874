"""Which weights of a model stand in which format: as published, or as a plan asks.

What a plan means is what the loader makes of it:

    weights=   every linear layer; router and norms stay bf16, as does `kv_b_proj`, which latent
               attention absorbs
    experts=   routed experts; without it they follow weights
    head=      embedding and head; without it they follow weights
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bifolio.errors import UnsupportedError
from bifolio.formats import BF16, Number, PhasePlan, WeightFormat
from bifolio.lab.plan.checkpoint_weights import CheckpointWeights
from bifolio.lab.plan.shapes import MatrixGroup, Weights, mtp_weights, served_weights
from bifolio.spec import ModelSpec
from bifolio.spec.config_json import read_config
from bifolio.spec.quantization import TensorLayout, read_quantization
from bifolio.spec.weights import LINEAR, FormatRule, Kind
from bifolio.wording import shown

_MOST_PATTERN, _MOST_REPEATS = 200, 4
"""Characters and repetitions of a pattern: more of them may take longer than anybody waits."""

_TABLES = (Kind.EMBEDDING, Kind.HEAD)


@dataclass(frozen=True, slots=True)
class Storage:
    """A format for some kinds. Every other kind is as `checkpoint` has it, or bf16.

    `source` says where that comes from.
    """

    formats: tuple[tuple[Kind, WeightFormat], ...]
    source: str
    absorbs: bool = False
    """Whether `kv_b_proj` is absorbed and so in bf16; in a file it stands as other matrices do."""
    checkpoint: CheckpointWeights | None = None
    """Set where headers of files say how each matrix is stored."""

    def served(self, model: ModelSpec) -> Weights:
        """What a server holds."""
        return self.checkpoint.served if self.checkpoint else served_weights(model)

    def mtp(self, model: ModelSpec) -> Weights:
        """What the multi-token-prediction layers add to the files."""
        return self.checkpoint.mtp if self.checkpoint else mtp_weights(model)

    def of(self, matrix: MatrixGroup) -> WeightFormat:
        """The format of a matrix."""
        if matrix.rule is FormatRule.FLOAT32 or matrix.kind is Kind.MTP_JOIN:
            return BF16
        if matrix.rule is FormatRule.ABSORBED and self.absorbs:
            return BF16
        planned = dict(self.formats).get(matrix.kind)
        return FormatRule.PLANNED.resident_format(matrix.stored or BF16, planned)

    def kind(self, kind: Kind) -> WeightFormat:
        return dict(self.formats).get(kind, BF16)

    def nbytes(self, weights: Weights, world: int = 1) -> dict[Kind, int]:
        """Bytes of each kind in files or on one rank, without the padding of kernels."""
        found: dict[Kind, int] = {}
        for matrix in weights.matrices:
            nbytes = matrix.nbytes(self.of(matrix), world)
            found[matrix.kind] = found.get(matrix.kind, 0) + nbytes
        for vectors in weights.vectors:
            found[vectors.kind] = found.get(vectors.kind, 0) + vectors.nbytes
        return {kind: found[kind] for kind in Kind if kind in found}

    def describe(self) -> str:
        """`routed_experts int4:g32, all else bf16`."""
        formats = {kind: {str(fmt)} for kind, fmt in self.formats}
        for matrix in self.checkpoint.served.matrices if self.checkpoint else ():
            formats.setdefault(matrix.kind, set()).add(str(self.of(matrix)))
        by_format: dict[str, list[Kind]] = {}
        for kind, names in formats.items():
            by_format.setdefault(" and ".join(sorted(names)), []).append(kind)
        by_format.pop(str(BF16), None)
        parts = [f"{', '.join(kinds)} {fmt}" for fmt, kinds in by_format.items()]
        return "; ".join([*parts, "all else bf16"])


def planned(model: ModelSpec, phase: PhasePlan, stored: Storage) -> Storage:
    """What one phase of a plan makes of a checkpoint; `weights=auto` leaves it as stored."""
    weights, source = phase.weights, stored.source
    if weights is None:
        formats = dict(stored.formats)
    else:
        present = [kind for kind in LINEAR if _has(model, kind)]
        formats, source = dict.fromkeys(present, weights), f"{weights}, every linear layer"
        formats |= dict.fromkeys(_TABLES, weights)
    if phase.experts is not None and model.moe:
        formats[Kind.ROUTED_EXPERTS] = phase.experts
        source += f"; {phase.experts}, routed experts"
    if phase.head is not None:
        formats |= dict.fromkeys(_TABLES, phase.head)
    return replace(
        stored, formats=tuple(formats.items()), source=source, absorbs=weights is not None
    )


def as_published(model: ModelSpec, weights: WeightFormat | None, like: PhasePlan) -> PhasePlan:
    """A plan in the form of published checkpoints, its cache and head those of `like`.

    With experts, int4 is for routed experts and the rest is bf16 (Kimi K2.6), and embedding and
    head are bf16 in every format (DeepSeek-V3, GLM-5.2).
    """
    plan = replace(like, weights=weights, experts=None)
    if weights is None or model.moe is None:
        return plan
    if weights.number is Number.INT4:
        return replace(plan, weights=BF16, experts=weights)
    return replace(plan, head=plan.head or (None if weights == BF16 else BF16))


def read_checkpoint(config: Mapping[str, Any]) -> tuple[ModelSpec, Storage]:
    """Shapes and formats that a checkpoint's `config.json` states; errors name the key."""
    model = read_shapes(config)
    return model, stored_formats(model, config)


def read_shapes(config: Mapping[str, Any]) -> ModelSpec:
    """The shapes alone, independent of the stored formats."""
    return read_config(
        {key: value for key, value in config.items() if key != "quantization_config"}
    )


def stored_formats(model: ModelSpec, config: Mapping[str, Any]) -> Storage:
    """How a checkpoint stores its weights, by the `quantization_config` of its `config.json`.

    UnsupportedError names what the loader would refuse too.
    """
    quantization = read_quantization(config)
    if quantization is None:
        return Storage((), "bf16, as published")
    kinds = [kind for kind in LINEAR if _has(model, kind)]
    if quantization.layout in (TensorLayout.BYTES, TensorLayout.PACKED) and _has(model, Kind.HEAD):
        kinds += [Kind.HEAD] if quantization.scales != "weight_scale_inv" else []
    fmt = quantization.format
    formats = ((kind, fmt) for kind in kinds if not _skips(model, kind, quantization.ignored))
    return Storage(tuple(formats), f"{fmt}, as published")


def _has(model: ModelSpec, kind: Kind) -> bool:
    moe = model.moe
    match kind:
        case Kind.DENSE_MLP:
            return moe is None or moe.first_dense > 0
        case Kind.ROUTED_EXPERTS:
            return moe is not None
        case Kind.SHARED_EXPERTS:
            return moe is not None and moe.shared > 0
        case Kind.INDEXER:
            return model.indexer is not None
        case Kind.HEAD:
            return not model.tie_embeddings
        case _:
            return True


def _skips(model: ModelSpec, kind: Kind, ignored: tuple[str, ...]) -> bool:
    """Whether the ignore list names the modules of this kind, by a name or by a `re:` pattern."""
    first = model.moe.first_dense if model.moe else 0
    sample = {
        Kind.ATTENTION: "model.layers.0.self_attn.o_proj",
        Kind.INDEXER: "model.layers.0.self_attn.indexer.wk",
        Kind.DENSE_MLP: "model.layers.0.mlp.down_proj",
        Kind.ROUTED_EXPERTS: f"model.layers.{first}.mlp.experts.0.down_proj",
        Kind.SHARED_EXPERTS: f"model.layers.{first}.mlp.shared_experts.down_proj",
        Kind.HEAD: "lm_head",
    }[kind]
    names = (sample, f"language_model.{sample}")
    return any(_names(entry, name) for entry in ignored for name in names)


def _names(entry: str, name: str) -> bool:
    """Whether an entry is this name, or a pattern of its beginning that can be tried in no time."""
    pattern = entry.removeprefix("re:")
    if pattern == entry:
        return entry == name
    try:
        if len(pattern) > _MOST_PATTERN or len(re.findall(r"[*+{]", pattern)) > _MOST_REPEATS:
            raise UnsupportedError(f"config.json: the pattern {shown(entry)} is too long")
        if re.search(r"\)[*+{]", pattern):
            raise UnsupportedError(f"config.json: the pattern {shown(entry)} repeats a group")
        return re.match(pattern, name) is not None
    except (re.error, OverflowError, RecursionError) as error:
        raise UnsupportedError(f"config.json: {shown(entry)} is no pattern: {error}") from error
