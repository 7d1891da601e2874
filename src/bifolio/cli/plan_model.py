"""What `bifolio plan` is asked about: a preset, a config.json, a folder or a GGUF file; a device.

No weights are read, only headers, and no torch is loaded.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bifolio.checkpoint.gguf import KEPT, TYPES, GGUFFile, GGUFTensor
from bifolio.checkpoint.gguf_spec import gguf_spec
from bifolio.config import parse_bytes
from bifolio.errors import CheckpointError, ConfigError
from bifolio.formats import BF16, PrecisionPlan, WeightFormat
from bifolio.input_files import read_object, visible
from bifolio.lab.plan.hardware import Device, find_device
from bifolio.lab.plan.presets import PRESETS
from bifolio.lab.plan.storage import Storage, planned, read_checkpoint
from bifolio.spec import ModelSpec
from bifolio.spec.weights import Kind


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model and how its checkpoint stores it. `launch` is what other engines would load."""

    name: str
    launch: str
    spec: ModelSpec
    stored: Storage
    notes: tuple[str, ...] = ()


def find_model(name: str) -> PlannedModel:
    """A preset's name, a folder in the Hugging Face layout, a config.json or a .gguf file.

    ConfigError lists the presets; CheckpointError names the file that cannot be read.
    """
    if preset := PRESETS.get(name.lower()):
        spec, stored = read_checkpoint(preset.config)
        if preset.fetched:
            fetched = planned(spec, PrecisionPlan.parse(preset.fetched).decode, stored)
            source = f"as `bifolio serve {name.lower()}` has them; for those published, --plan bf16"
            stored = replace(fetched, source=source)
        notes = (preset.note,) if preset.note else ()
        return PlannedModel(name.lower(), preset.hub_id, spec, stored, notes)
    path = Path(name).expanduser()
    if path.is_dir():
        spec, stored = read_checkpoint(_read_json(path / "config.json"))
        return PlannedModel(name, name, spec, stored, _on_disk(path))
    if path.suffix == ".json" and path.is_file():
        spec, stored = read_checkpoint(_read_json(path))
        return PlannedModel(name, str(path.parent), spec, stored)
    if path.suffix == ".gguf" and path.is_file():
        return _from_gguf(name, path)
    raise ConfigError(
        f"there is no model {name!r}; give a folder, a config.json, a .gguf file, or one of "
        f"{', '.join(PRESETS)}"
    )


def find_hardware(name: str, memory: str | None, efficiency: int) -> Device:
    """A device by name, `this` for the machine at hand, measured.

    `memory` (`64GiB`) replaces its memory; `efficiency` is the percent of its rates that is
    reached.
    """
    memory_bytes = None if memory is None else parse_bytes(memory)
    if name.lower() == "this":
        from bifolio.cli.plan_machine import measure_machine

        device = measure_machine(memory_bytes)
    else:
        device = find_device(name)
        device = device if memory_bytes is None else replace(device, memory_bytes=memory_bytes)
    return device if efficiency == 100 else device.at(efficiency)


def _read_json(path: Path) -> dict[str, Any]:
    found = read_object(path)
    if found is None:
        raise CheckpointError(f"{path.parent} holds no {path.name}")
    return found


def _on_disk(folder: Path) -> tuple[str, ...]:
    files = [path for path in visible(folder, "*.safetensors") if path.is_file()]
    if not files:
        return ()
    size = sum(file.stat().st_size for file in files)
    return (f"the folder's {len(files)} safetensors files take {size:,} B",)


_GGUF_KINDS = {
    "token_embd": Kind.EMBEDDING,
    "output": Kind.HEAD,
    "attn_q": Kind.ATTENTION,
    "attn_k": Kind.ATTENTION,
    "attn_v": Kind.ATTENTION,
    "attn_output": Kind.ATTENTION,
    "ffn_gate": Kind.DENSE_MLP,
    "ffn_up": Kind.DENSE_MLP,
    "ffn_down": Kind.DENSE_MLP,
}
"""Kinds of matrices by the last part of their name before `.weight`."""

_FUSED = dict.fromkeys(("attn_q", "attn_k", "attn_v"), "qkv")
_FUSED |= dict.fromkeys(("ffn_gate", "ffn_up"), "gate_up")
"""Those that are one matrix of a layer when they are served, and so in one format."""


def _from_gguf(name: str, path: Path) -> PlannedModel:
    file = GGUFFile(path)
    matrices: dict[tuple[Kind, str], list[GGUFTensor]] = {}
    for tensor_name, tensor in file.tensors.items():
        layer, _, part = tensor_name.removesuffix(".weight").rpartition(".")
        if tensor_name.endswith(".weight") and part in _GGUF_KINDS:
            matrix = (_GGUF_KINDS[part], f"{layer}.{_FUSED.get(part, part)}")
            matrices.setdefault(matrix, []).append(tensor)
    sizes: dict[Kind, Counter[WeightFormat]] = {}
    for (kind, _), tensors in matrices.items():
        types = {TYPES[tensor.type].name for tensor in tensors}
        fmt = KEPT.get(types.pop(), BF16) if len(types) == 1 else BF16
        sizes.setdefault(kind, Counter())[fmt] += sum(math.prod(t.shape) for t in tensors)
    formats = {kind: count.most_common(1)[0][0] for kind, count in sizes.items()}
    mixed = [str(kind) for kind, count in sizes.items() if len(count) > 1]
    notes = [f"the file takes {path.stat().st_size:,} B"]
    if mixed:
        notes.append(f"{', '.join(mixed)}: several formats; the most frequent is counted for all")
    stored = Storage(
        tuple(formats.items()), "as in the file; types without a format of ours become bf16"
    )
    return PlannedModel(name, str(path), gguf_spec(file), stored, tuple(notes))
