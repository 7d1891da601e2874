"""Experts mapped from files give the bits of experts in memory, and files prove themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bifolio.checkpoint.load import LoadedModels, load_models
from bifolio.checkpoint.source import resolve_source
from bifolio.errors import CheckpointError, ConfigError
from bifolio.formats import PrecisionPlan
from bifolio.kernels.mapped_weights import PAGE, MappedFile
from bifolio.kernels.native import NativeOps
from bifolio.kernels.reference import ReferenceOps
from support.checkpoint_layouts import LAYOUTS, quantised
from support.forward import PagedRun
from support.tiny import random_weights, tiny_config, write_model, write_weights

CONFIG = tiny_config("deepseek_v3")
IDS = list(range(100, 140))


def load(folder: Path, experts: Path | None, plan: str = "auto/fp32") -> LoadedModels:
    parsed = PrecisionPlan.parse(plan)
    return load_models(resolve_source(str(folder)), parsed, NativeOps(2), experts=experts)


def logits(models: LoadedModels) -> Tensor:
    return PagedRun(models.decode).step({"a": IDS})["a"].clone()


def stored(folder: Path, layout: str) -> Path:
    weights, _ = quantised(random_weights(CONFIG), layout, r"mlp\.experts\.")
    write_model(folder, CONFIG | {"quantization_config": LAYOUTS[layout][0]}, tokenizer=False)
    write_weights(folder, weights)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return stored(tmp_path / "model", "int4 in groups of 32")


@pytest.mark.parametrize(
    ("layout", "plan"),
    [
        ("int4 in groups of 32", "auto/fp32"),
        ("int4 with zero points", "auto/fp32"),
        ("GPTQ symmetric, in order of activations", "auto/fp32"),
        ("fp8 in blocks", "int4:g32:z:a8/fp32"),
        ("int8 by channel", "auto/fp32"),
    ],
)
def test_mapped_experts_give_the_same_bits(layout: str, plan: str, tmp_path: Path) -> None:
    folder = stored(tmp_path / "model", layout)
    wanted = logits(load(folder, None, plan))
    first = load(folder, tmp_path / "experts", plan)
    assert torch.equal(logits(first), wanted)
    again = load(folder, tmp_path / "experts", plan)
    assert torch.equal(logits(again), wanted)
    assert first.experts is not None and again.experts is not None
    assert again.experts.folder == first.experts.folder
    assert again.experts.count == 3 * 8


def test_a_second_start_reads_no_expert_and_packs_none(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = logits(load(model, tmp_path / "experts"))
    packed: list[int] = []
    pack = NativeOps.pack
    monkeypatch.setattr(NativeOps, "pack", lambda *a: (packed.append(1), pack(*a))[1])
    models = load(model, tmp_path / "experts")
    dense = len(packed)
    assert torch.equal(logits(models), wanted)
    load(model, tmp_path / "others")
    assert len(packed) == 2 * dense + 2 * 3 * 8
    assert models.nbytes < load(model, None).nbytes
    assert models.experts is not None and models.experts.nbytes >= 3 * 8 * 4096


def test_other_weights_under_the_same_name_are_packed_anew(model: Path, tmp_path: Path) -> None:
    first = load(model, tmp_path / "experts").experts
    write_weights(
        model, quantised(random_weights(CONFIG, 1), "int4 in groups of 32", r"mlp\.experts\.")[0]
    )
    models = load(model, tmp_path / "experts")
    assert first is not None and models.experts is not None
    assert models.experts.folder != first.folder
    assert torch.equal(logits(models), logits(load(model, None)))


KILLED = """
import os, sys
from pathlib import Path
from bifolio.formats import PrecisionPlan
from bifolio.kernels.native import NativeOps
from bifolio.checkpoint.load import load_models
from bifolio.checkpoint.source import resolve_source
folder = Path(sys.argv[2])
def kill(*_):
    records = sum(len(path.read_text().splitlines()) for path in folder.rglob("*.jsonl"))
    if records == 8 + 5: os._exit(9)
load_models(resolve_source(sys.argv[1]), PrecisionPlan.parse("auto/fp32"), NativeOps(1),
            experts=folder, progress=kill)
"""


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.rglob("model.layers*"))}


def test_a_start_that_was_killed_is_taken_up_to_the_same_bytes(model: Path, tmp_path: Path) -> None:
    load(model, tmp_path / "whole")
    broken = tmp_path / "broken"
    command = [sys.executable, "-c", KILLED, str(model), str(broken)]
    assert subprocess.run(command, check=False).returncode == 9
    (part,) = broken.rglob("*.part")
    lines = part.with_suffix(".jsonl").read_text().splitlines()
    assert len(lines) == 5, "the kill came in the middle of the second layer"
    with part.open("r+b") as data:  # a record that is not whole, and half a line
        data.seek(json.loads(lines[3])["start"])
        data.write(b"\xff")
    with part.with_suffix(".jsonl").open("a") as journal:
        journal.write(lines[-1][:30])
    models = load(model, broken)
    assert files(broken) == files(tmp_path / "whole")
    assert torch.equal(logits(models), logits(load(model, None)))


def test_a_record_that_changed_is_noticed_at_its_first_use(model: Path, tmp_path: Path) -> None:
    load(model, tmp_path / "experts")
    for path in (tmp_path / "experts").rglob("*.packed"):
        data = bytearray(path.read_bytes())
        for line in path.with_suffix(".jsonl").read_text().splitlines():
            data[json.loads(line)["start"] + 100] ^= 1
        path.write_bytes(data)
    models = load(model, tmp_path / "experts")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp.*has changed.*delete it"):
        logits(models)


def test_a_file_that_is_cut_while_it_is_in_use_ends_the_request_and_not_the_process(
    model: Path, tmp_path: Path
) -> None:
    models = load(model, tmp_path / "experts")
    logits(models)
    for path in (tmp_path / "experts").rglob("*.packed"):
        with path.open("r+b") as data:
            data.truncate(PAGE)
    with pytest.raises(CheckpointError, match=r"packed was cut from .* delete it"):
        logits(models)


def test_a_cut_file_is_packed_anew(model: Path, tmp_path: Path) -> None:
    load(model, tmp_path / "experts")
    path = next((tmp_path / "experts").rglob("*.packed"))
    with path.open("r+b") as data:
        data.truncate(path.stat().st_size - PAGE)
    assert torch.equal(logits(load(model, tmp_path / "experts")), logits(load(model, None)))


def test_only_chosen_experts_come_into_memory(model: Path, tmp_path: Path) -> None:
    """One token of a layer reads three of its eight experts; the others stay on the disk."""
    load(model, tmp_path / "experts")
    models = load(model, tmp_path / "experts")
    assert models.experts is not None
    PagedRun(models.decode).step({"a": [7]})
    proved = [record._proved for record in models.experts._records]
    assert [sum(proved[i : i + 8]) for i in (0, 8, 16)] == [3, 3, 3]


def test_a_pass_lets_it_be_known_in_each_layer_and_before_each_mapped_expert(
    model: Path, tmp_path: Path
) -> None:
    def heartbeats(models: LoadedModels) -> int:
        seen: list[None] = []
        models.decode.ops.heartbeat = lambda: seen.append(None)
        PagedRun(models.decode).step({"a": [7]})
        return len(seen)

    layers, mixtures, chosen = 4, 3, 3
    in_memory = heartbeats(load(model, None))
    assert in_memory >= 2 * layers + 2 * mixtures
    mapped = heartbeats(load(model, tmp_path / "experts"))
    assert mapped == in_memory + 2 * mixtures * (chosen - 1)


def test_a_limit_of_memory_is_kept_and_changes_no_bit(model: Path, tmp_path: Path) -> None:
    wanted = logits(load(model, tmp_path / "experts"))
    whole = load(model, tmp_path / "experts").experts
    assert whole is not None
    size = whole.nbytes // whole.count
    limit = 5 * size
    plan = PrecisionPlan.parse("auto/fp32")
    source = resolve_source(str(model))
    models = load_models(
        source, plan, NativeOps(2), experts=tmp_path / "experts", expert_memory=limit
    )
    experts = models.experts
    assert experts is not None
    experts.survey()
    on_disk = experts.resident < experts.nbytes  # a RAM disk keeps everything
    assert experts.resident == 0 or not on_disk, "nothing has been used yet"
    assert torch.equal(logits(models), wanted)
    experts.survey()
    assert experts.resident <= limit or not on_disk
    assert experts._shelf._bytes <= limit
    assert torch.equal(logits(models), wanted)


def test_resident_bytes_are_those_in_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(16 * PAGE))
    file = MappedFile(path)
    assert file.resident(0, 16 * PAGE) == 16 * PAGE
    assert file.resident(PAGE, PAGE + 1) == PAGE + 1
    with path.open("rb") as opened:
        import os

        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 4 * PAGE, 8 * PAGE, os.POSIX_FADV_DONTNEED)
    assert file.resident(0, 16 * PAGE) in (8 * PAGE, 16 * PAGE)  # a RAM disk keeps them


def test_the_survey_goes_round(model: Path, tmp_path: Path) -> None:
    experts = load(model, tmp_path / "experts").experts
    assert experts is not None
    assert experts.resident == 0
    experts.survey(10)
    some = experts.resident
    assert 0 < some < experts.nbytes
    experts.survey(14)
    assert experts.resident == experts.nbytes, "just written, so all in the page cache"


def test_what_cannot_be_mapped_is_refused(model: Path, tmp_path: Path) -> None:
    plan = PrecisionPlan.parse("auto/fp32")
    with pytest.raises(ConfigError, match="native kernels"):
        load_models(resolve_source(str(model)), plan, ReferenceOps(), experts=tmp_path)
    dense = write_model(tmp_path / "dense", tiny_config("llama"), tokenizer=False)
    with pytest.raises(ConfigError, match="no experts"):
        load(dense, tmp_path / "experts", "auto/fp32")


def test_no_room_is_said_before_it_runs_out(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 1000))
    with pytest.raises(ConfigError, match=r"1000 bytes free.*BIFOLIO_HOME"):
        load(model, tmp_path / "experts")
