"""A folder is read whole or refused with names: nothing is guessed, merged or left out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bifolio.checkpoint.load import LoadedModels, load_models
from bifolio.checkpoint.safetensors_folder import SafetensorsFolder
from bifolio.checkpoint.source import resolve_source
from bifolio.errors import CheckpointError, UnsupportedError
from bifolio.formats import Phase, PrecisionPlan
from bifolio.kernels.reference import ReferenceOps
from support.forward import PagedRun
from support.tiny import random_weights, tiny_config, write_model, write_weights

IDS = list(range(100, 120))
CONFIG = tiny_config("qwen3")
INDEX = "model.safetensors.index.json"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"
FIRST, SECOND = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"


def load(folder: Path, plan: str = "fp32/fp32") -> LoadedModels:
    return load_models(resolve_source(str(folder)), PrecisionPlan.parse(plan), ReferenceOps())


def logits(folder: Path, plan: str = "fp32/fp32") -> torch.Tensor:
    return PagedRun(load(folder, plan).decode).step({"a": IDS})["a"]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", CONFIG, shards=3, tokenizer=False)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_index(folder: Path, **changes: str) -> None:
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    edit_json(folder / INDEX, weight_map=weight_map | changes)


def test_shards_give_what_one_file_gives(sharded: Path, tmp_path: Path) -> None:
    whole = write_model(tmp_path / "whole", CONFIG, tokenizer=False)
    assert torch.equal(logits(sharded), logits(whole))


# The five refusals of a sharded folder


def test_a_missing_shard_is_refused(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    with pytest.raises(CheckpointError, match=f"{SECOND}.*missing"):
        load(sharded)


def test_a_stray_shard_with_a_name_of_the_model_is_refused(sharded: Path) -> None:
    stray = "model-00004-of-00004.safetensors"
    save_file({"model.norm.weight": torch.ones(64)}, sharded / stray)
    with pytest.raises(CheckpointError, match=f"{stray}.*does not name"):
        load(sharded)


def test_a_stale_index_is_refused(sharded: Path) -> None:
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    name = next(n for n, file in weight_map.items() if file == FIRST)
    edit_index(sharded, **{name: "old.safetensors"})
    with pytest.raises(CheckpointError, match=r"old\.safetensors.*missing"):
        load(sharded)
    edit_index(sharded, **{name: SECOND})  # the wrong one of two files that exist
    with pytest.raises(CheckpointError, match=re.escape(name)):
        load(sharded)


def test_a_second_copy_of_the_model_beside_the_shards_is_refused(sharded: Path) -> None:
    save_file(random_weights(CONFIG), sharded / "consolidated.safetensors")
    with pytest.raises(CheckpointError, match=r"consolidated\.safetensors"):
        load(sharded)


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.5, 0.999])
def test_a_cut_file_is_refused(kept: float, sharded: Path) -> None:
    data = (sharded / SECOND).read_bytes()
    (sharded / SECOND).write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(CheckpointError, match=f"{SECOND}.*(damaged|empty)"):
        load(sharded)


def test_a_file_that_is_cut_while_it_loads_is_an_error_and_no_signal(sharded: Path) -> None:
    files = SafetensorsFolder(sharded)
    name = next(
        n
        for n, file in json.loads((sharded / INDEX).read_text())["weight_map"].items()
        if file == SECOND
    )
    with (sharded / SECOND).open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(CheckpointError, match=f"{SECOND} ends at byte"):
        files.tensor(name)


@pytest.mark.parametrize("name", ["._model.safetensors", ".hidden.safetensors"])
def test_files_whose_names_begin_with_a_dot_are_passed_over(name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", CONFIG, tokenizer=False)
    wanted = logits(folder)
    (folder / name).write_bytes(b"\0\x05\x16\x07")
    assert torch.equal(logits(folder), wanted)


@pytest.mark.parametrize(
    ("file", "head", "said"),
    [
        (SECOND, POINTER, "git lfs pull"),
        (INDEX, POINTER, "git lfs pull"),
        ("config.json", POINTER, "git lfs pull"),
        (SECOND, b"<!doctype html><p>Log in", "HTML page"),
        (SECOND, b"PK\x03\x04" + b"x" * 100, "ZIP archive"),
        (SECOND, b"\0" * 4096, "zeros"),
        ("config.json", b"<html>", "HTML page"),
    ],
)
def test_another_file_in_place_of_one_is_named(
    file: str, head: bytes, said: str, sharded: Path
) -> None:
    (sharded / file).write_bytes(head)
    with pytest.raises(CheckpointError, match=f"{re.escape(file)}.*{said}"):
        load(sharded)


def test_a_name_twice_in_one_file_is_refused(sharded: Path) -> None:
    data = (sharded / SECOND).read_bytes()
    size = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + size])
    name, entry = next((n, e) for n, e in entries.items() if n != "__metadata__")
    header = json.dumps({name: entry})[:-1] + "," + json.dumps(entries)[1:]
    padded = header.encode() + b" " * (-len(header) % 8)
    (sharded / SECOND).write_bytes(len(padded).to_bytes(8, "little") + padded + data[8 + size :])
    with pytest.raises(CheckpointError, match=rf"{SECOND}.*{name}' stands there twice"):
        load(sharded)


# What else can be wrong with files


def test_several_files_without_an_index_are_refused(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    with pytest.raises(CheckpointError, match=f"{FIRST}.*no {INDEX}"):
        load(sharded)


def test_a_tensor_that_the_index_does_not_list_is_refused(sharded: Path) -> None:
    weights = load_file(sharded / FIRST) | {"extra.weight": torch.ones(2)}
    save_file(weights, sharded / FIRST)
    with pytest.raises(CheckpointError, match=r"extra\.weight.*stale"):
        load(sharded)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("{", "not JSON"),
        ("{}", "weight_map"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "outside the folder"),
        ('{"weight_map": {"a": "b/../../x"}}', "outside the folder"),
        ('{"weight_map": {"a": "x\\n"}}', "printable"),
        ('{"weight_map": {"a\\n": "x"}}', "printable"),
        ('{"weight_map": []}', "weight_map"),
        ('{"weight_map": {"a": 1}}', "weight_map"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a' stands there twice"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "outside the folder"),
    ],
)
def test_a_damaged_index_is_refused(text: str, cause: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=cause):
        load(sharded)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", CONFIG, tokenizer=False)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        load(folder)


# Tensors and weights meet one to one


def with_weights(folder: Path, change: dict[str, torch.Tensor | None]) -> Path:
    """The model with tensors replaced, added, or (None) left out."""
    write_model(folder, CONFIG, tokenizer=False)
    weights = random_weights(CONFIG) | change
    write_weights(folder, {n: tensor for n, tensor in weights.items() if tensor is not None})
    return folder


Q_PROJ = "model.layers.2.self_attn.q_proj"


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = with_weights(tmp_path, {f"{Q_PROJ}.weight": None})
    with pytest.raises(CheckpointError, match=f"missing.*{Q_PROJ}.weight"):
        load(folder)


def test_a_tensor_without_use_is_named(tmp_path: Path) -> None:
    folder = with_weights(tmp_path, {f"{Q_PROJ}.bias": torch.zeros(128)})
    with pytest.raises(CheckpointError, match=f"no use.*{Q_PROJ}.bias"):
        load(folder)


def test_a_misspelt_tensor_is_refused(tmp_path: Path) -> None:
    weight = random_weights(CONFIG)[f"{Q_PROJ}.weight"]
    folder = with_weights(
        tmp_path, {f"{Q_PROJ}.weight": None, f"{Q_PROJ.replace('q_proj', 'q_prj')}.weight": weight}
    )
    with pytest.raises(CheckpointError, match="q_proj"):
        load(folder)


@pytest.mark.parametrize("shape", [(64, 128), (128, 63), (128,), (1, 128, 64)])
def test_a_wrong_shape_is_named(shape: tuple[int, ...], tmp_path: Path) -> None:
    folder = with_weights(tmp_path, {f"{Q_PROJ}.weight": torch.zeros(shape)})
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ}.weight has shape \[{shape[0]}"):
        load(folder)


BUFFERS: dict[str, torch.Tensor | None] = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(16),
    "model.layers.3.self_attn.rotary_emb.cos_cached": torch.rand(1, 1, 32, 32),
    "model.layers.3.self_attn.rotary_emb.sin_cached": torch.rand(1, 1, 32, 32).half(),
    "model.rotary_emb.inv_freq": torch.rand(16),
    "model.rotary_emb.original_inv_freq": torch.rand(16),
    "model.causal_mask": torch.ones(8, 8, dtype=torch.bool),
}


def test_buffers_that_follow_from_the_configuration_are_passed_over(tmp_path: Path) -> None:
    folder = with_weights(tmp_path / "a", BUFFERS)
    plain = with_weights(tmp_path / "b", {})
    assert torch.equal(logits(folder), logits(plain))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.4.self_attn.rotary_emb.inv_freq",  # there are four layers
        "model.layers.0.mlp.rotary_emb.inv_freq",
        "model.layers.0.self_attn.rotary_emb.gain",
        "model.layers.0.self_attn.bias",
        "rotary_emb.inv_freq",
    ],
)
def test_what_only_looks_like_a_buffer_is_refused(name: str, tmp_path: Path) -> None:
    folder = with_weights(tmp_path, {name: torch.rand(16)})
    with pytest.raises(CheckpointError, match=f"no use.*{name}"):
        load(folder)


def test_a_number_type_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = with_weights(
        tmp_path, {f"{Q_PROJ}.weight": torch.zeros(128, 64, dtype=torch.float8_e4m3fn)}
    )
    with pytest.raises(UnsupportedError, match=f"{Q_PROJ}.weight is stored as F8_E4M3"):
        load(folder)


def test_swapped_gate_and_up_move_the_logits(tmp_path: Path) -> None:
    """The accounting cannot see a swap of equal shapes, so the logits must."""
    weights = random_weights(CONFIG)
    gate, up = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up"))
    plain = with_weights(tmp_path / "a", {})
    swapped = with_weights(tmp_path / "b", {gate: weights[up], up: weights[gate]})
    assert (logits(plain) - logits(swapped)).abs().max() > 0.1


def test_a_head_beside_tied_embeddings_must_equal_them(tmp_path: Path) -> None:
    config = tiny_config("llama", tie_word_embeddings=True)
    folder = write_model(tmp_path, config, tokenizer=False)
    weights = random_weights(config)
    plain = logits(folder)
    table = weights["model.embed_tokens.weight"]
    write_weights(folder, weights | {"lm_head.weight": table.clone()})
    assert torch.equal(logits(folder), plain)
    write_weights(folder, weights | {"lm_head.weight": table + 1})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        load(folder)


# Number formats of the two phases


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_auto_means_bf16_for_every_float_checkpoint(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write_model(tmp_path, CONFIG, dtype=dtype, tokenizer=False)
    models = load(folder, "auto/fp32")
    assert str(models.decode.decoder.layers[0].attention.qkv.format) == "bf16"
    assert str(models.decode.decoder.head.format) == "bf16"
    assert torch.equal(logits(folder, "auto/fp32"), logits(folder, "bf16/fp32"))


def test_fp16_numbers_are_exact_in_fp32(tmp_path: Path) -> None:
    half = write_model(tmp_path / "half", CONFIG, dtype=torch.float16, tokenizer=False)
    single = write_model(tmp_path / "single", CONFIG, tokenizer=False)
    weights = random_weights(CONFIG, dtype=torch.float16)
    write_weights(single, {name: tensor.float() for name, tensor in weights.items()})
    assert torch.equal(logits(half), logits(single))


@pytest.mark.parametrize(
    ("weights", "bound"),
    [("fp8", 1.0), ("int8", 0.3), ("int8:a8", 0.4), ("int4:g32", 3.0), ("int4:g32:z:a8", 4.0)],
)
def test_weights_are_encoded_at_load(weights: str, bound: float, tmp_path: Path) -> None:
    """Bounds are three times what was seen on logits with a standard deviation of about 1."""
    folder = write_model(tmp_path, CONFIG, tokenizer=False)
    decoder = load(folder, f"{weights}/fp32").decode.decoder
    assert str(decoder.layers[3].mlp.gate_up.format) == weights
    assert str(decoder.head.format) == weights
    moved = (logits(folder, f"{weights}/fp32") - logits(folder)).abs().max()
    assert 0 < moved < bound


def test_a_nan_that_a_format_cannot_hold_is_refused_with_the_name(tmp_path: Path) -> None:
    weight = random_weights(CONFIG)[f"{Q_PROJ}.weight"]
    weight[3, 5] = float("nan")
    folder = with_weights(tmp_path, {f"{Q_PROJ}.weight": weight})
    with pytest.raises(CheckpointError, match=f"{Q_PROJ}.*NaN"):
        load(folder, "int8/fp32")


def test_equal_phases_share_one_model_and_unequal_ones_what_is_equal(tmp_path: Path) -> None:
    folder = write_model(tmp_path, CONFIG, tokenizer=False)
    source = resolve_source(str(folder))
    one = load_models(source, PrecisionPlan.parse("fp32/fp32"), ReferenceOps())
    assert one.prefill is one.decode
    plan = PrecisionPlan.parse(
        prefill="weights=fp32,cache=fp32,head=bf16", decode="weights=bf16,cache=fp32"
    )
    two = load_models(source, plan, ReferenceOps())
    prefill, decode = two.phase(Phase.PREFILL).decoder, two.phase(Phase.DECODE).decoder
    formats = [str(model.layers[0].mlp.down.format) for model in (prefill, decode)]
    assert formats == ["fp32", "bf16"]
    assert prefill.head is decode.head
    assert prefill.norm.gain_h is decode.norm.gain_h
    layers = sum(
        w.nbytes
        for layer in one.decode.decoder.layers
        for w in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
    )
    assert two.nbytes == one.nbytes + layers


def test_the_identity_tells_numbers_apart_and_not_files(tmp_path: Path) -> None:
    folders = [
        write_model(tmp_path / "a", CONFIG, tokenizer=False),
        write_model(tmp_path / "b", CONFIG, shards=4, tokenizer=False),
        write_model(tmp_path / "c", CONFIG, seed=1, tokenizer=False),
    ]
    first, same, other = (load(folder).identity for folder in folders)
    assert first == same != other
    assert first == load(folders[0], "bf16/fp32").identity
    edit_json(folders[0] / "config.json", eos_token_id=9)
    assert first == load(folders[0]).identity
    edit_json(folders[0] / "config.json", rope_parameters={"rope_theta": 5e5})
    assert first != load(folders[0]).identity


def test_progress_counts_every_weight_once_per_format(tmp_path: Path) -> None:
    folder = write_model(tmp_path, CONFIG, tokenizer=False)
    seen: list[tuple[int, int]] = []
    plan = PrecisionPlan.parse(prefill="fp32/fp32", decode="bf16/fp32")
    load_models(
        resolve_source(str(folder)),
        plan,
        ReferenceOps(),
        progress=lambda done, total: seen.append((done, total)),
    )
    total = seen[-1][1]
    assert seen == [(i + 1, total) for i in range(total)]


def test_positions_bound_the_rope_table(tmp_path: Path) -> None:
    folder = write_model(tmp_path, CONFIG, tokenizer=False)
    plan = PrecisionPlan.parse("fp32/fp32")
    short = load_models(resolve_source(str(folder)), plan, ReferenceOps(), positions=40)
    assert short.decode.decoder.cos_sin_pd.shape == (40, 32)
    assert torch.equal(PagedRun(short.decode).step({"a": IDS})["a"], logits(folder))
