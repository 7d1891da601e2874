"""What `bifolio plan` is asked about: a preset, a config.json, a folder or a GGUF file; a device.

No weights are read, only headers; presets and a config.json need no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bifolio.checkpoint.source import ModelSource
from bifolio.config import parse_bytes
from bifolio.errors import CheckpointError, ConfigError, UnsupportedError
from bifolio.formats import PrecisionPlan
from bifolio.input_files import read_object, visible
from bifolio.lab.plan.checkpoint_weights import CheckpointWeights
from bifolio.lab.plan.hardware import Device, find_device
from bifolio.lab.plan.presets import PRESETS
from bifolio.lab.plan.storage import Storage, planned, read_checkpoint, read_shapes, stored_formats
from bifolio.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model and how its checkpoint stores it. `launch` is what other engines would load."""

    name: str
    launch: str
    spec: ModelSpec
    stored: Storage
    notes: tuple[str, ...] = ()


def find_model(name: str, plan: PrecisionPlan | None = None) -> PlannedModel:
    """A preset's name, a folder in the Hugging Face layout, a config.json or a .gguf file.

    ConfigError lists the presets; CheckpointError names the file that cannot be read;
    UnsupportedError the stored format, unless `plan` gives all weights another.
    """
    if preset := PRESETS.get(name.lower()):
        spec, stored = read_checkpoint(preset.config)
        if preset.fetched:
            fetched = planned(spec, PrecisionPlan.parse(preset.fetched).decode, stored)
            origin = f"as `bifolio serve {name.lower()}` has them; for those published, --plan bf16"
            stored = replace(fetched, source=origin)
        notes = (preset.note,) if preset.note else ()
        return PlannedModel(name.lower(), preset.hub_id, spec, stored, notes)
    path = Path(name).expanduser()
    if path.is_dir() and visible(path, "*.safetensors"):
        source = ModelSource(name, path)
        spec = source.spec
        stored = _stored_or_planned(plan, lambda: _on_disk(source))
        return PlannedModel(name, name, spec, stored, _file_sizes(path))
    if path.is_dir() or (path.suffix == ".json" and path.is_file()):
        config = _read_json(path / "config.json" if path.is_dir() else path)
        spec = read_shapes(config)
        stored = _stored_or_planned(plan, lambda: stored_formats(spec, config))
        return PlannedModel(name, name if path.is_dir() else str(path.parent), spec, stored)
    if path.suffix == ".gguf" and path.is_file():
        source = ModelSource(name, path)
        notes = (f"the file takes {path.stat().st_size:,} B",)
        return PlannedModel(name, str(path), source.spec, _on_disk(source), notes)
    raise ConfigError(
        f"there is no model {name!r}; give a folder, a config.json, a .gguf file, or one of "
        f"{', '.join(PRESETS)}"
    )


def _stored_or_planned(plan: PrecisionPlan | None, read: Callable[[], Storage]) -> Storage:
    """The stored formats; where they cannot be read, none if the plan does without them."""
    try:
        return read()
    except UnsupportedError as error:
        if plan is not None and all(side.weights for side in plan.sides):
            return Storage((), "as planned; the stored format cannot be loaded")
        raise UnsupportedError(
            f"{error}; hint: --plan weights=FORMAT plans it in another format"
        ) from error


def _on_disk(source: ModelSource) -> Storage:
    """By the headers of files, which torch reads: imported here for the presets' sake."""
    from bifolio.checkpoint.open import stored_matrices

    weights = CheckpointWeights.of(source.spec, stored_matrices(source))
    return Storage((), "as stored", checkpoint=weights)


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


def _file_sizes(folder: Path) -> tuple[str, ...]:
    files = [path for path in visible(folder, "*.safetensors") if path.is_file()]
    size = sum(file.stat().st_size for file in files)
    return (f"the folder's {len(files)} safetensors files take {size:,} B",)
