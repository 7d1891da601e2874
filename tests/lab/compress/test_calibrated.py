"""GPTQ and AWQ: what they promise on matrices, and on whole models of every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bifolio.checkpoint.load import load_models
from bifolio.checkpoint.source import resolve_source
from bifolio.errors import ConfigError
from bifolio.formats import PrecisionPlan, WeightFormat
from bifolio.kernels.reference import ReferenceOps
from bifolio.lab.compress.awq import folds
from bifolio.lab.compress.calibrated import FEWEST, Changed
from bifolio.lab.compress.calibration_texts import read_texts
from bifolio.lab.compress.gptq import gptq_codes
from bifolio.lab.compress.inputs import LayerRunner, Moments, Streams
from bifolio.lab.compress.recipe import Method
from bifolio.lab.compress.rtn import fit_grid
from bifolio.lab.compress.source_model import SourceModel
from support.compressed_checkpoints import IDS, compress, logits, write_source
from support.forward import PagedRun

FAMILIES = ["llama", "qwen3_moe", "deepseek_v3", "glm_moe_dsa"]
INT4 = WeightFormat.parse("int4:g32")


def texts(count: int = 12, size: int = 48) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 320, (size,), generator=generator).tolist() for _ in range(count)]


def small(folder: Path, family: str, **options: Any) -> Path:
    """Two layers."""
    index = {"indexer_types": ["full", "shared"]} if family == "glm_moe_dsa" else {}
    return write_source(folder, family, num_hidden_layers=2, **index, **options)


def output_error(codes: Tensor, w: Tensor, x: Tensor) -> float:
    return float(((codes - w) @ x.T).norm() / (w @ x.T).norm())


def correlated(rows: int = 512, k: int = 128) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    mix = torch.randn(k // 4, k, generator=generator)
    return torch.randn(rows, k // 4, generator=generator) @ mix + 0.1 * torch.randn(rows, k)


def test_gptq_loses_far_less_of_the_output_than_rounding_does() -> None:
    x, w = correlated(), torch.randn(64, 128)
    grid = fit_grid(w, INT4, torch.bfloat16, x.square().mean(dim=0))
    nearest = grid.coded(grid.codes(w)).decode()
    found = grid.coded(gptq_codes(w, grid, x.T @ x)).decode()
    assert output_error(found, w, x) < 0.5 * output_error(nearest, w, x)
    held_out = correlated(64)
    assert output_error(found, w, held_out) < 0.7 * output_error(nearest, w, held_out)


def test_gptq_is_rounding_to_nearest_where_inputs_are_not_correlated() -> None:
    w = torch.randn(16, 64)
    grid = fit_grid(w, INT4, torch.bfloat16)
    assert torch.equal(gptq_codes(w, grid, torch.eye(64)), grid.codes(w))
    assert torch.equal(gptq_codes(w, grid, torch.zeros(64, 64)), grid.codes(w))


@pytest.mark.parametrize("k", [40, 130, 300])
def test_gptq_takes_blocks_and_short_tails_of_any_length(k: int) -> None:
    x, w = torch.randn(200, k).cumsum(dim=1), torch.randn(8, k)
    grid = fit_grid(w, INT4, torch.bfloat16)
    found = gptq_codes(w, grid, x.T @ x)
    nearest = grid.coded(grid.codes(w)).decode()
    assert output_error(grid.coded(found).decode(), w, x) < output_error(nearest, w, x)


def test_moments_do_not_depend_on_how_rows_arrive() -> None:
    x = torch.randn(100, 16)
    whole, parts = Moments(16), Moments(16)
    whole.add(x)
    for start in range(0, 100, 7):
        parts.add(x[start : start + 7])
    assert torch.allclose(whole.gram(), x.T @ x, rtol=1e-4, atol=1e-3)
    assert torch.allclose(parts.gram(), x.T @ x, rtol=1e-4, atol=1e-3)
    assert torch.allclose(parts.squares, x.square().mean(dim=0), rtol=1e-4)
    assert torch.allclose(parts.magnitudes, x.abs().mean(dim=0), rtol=1e-4)
    assert parts.count == 100


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_by_layer_is_the_model(family: str, tmp_path: Path) -> None:
    """Hidden states behind the last layer, through norm and head, are the model's logits."""
    source = SourceModel(resolve_source(str(write_source(tmp_path, family))))
    streams = Streams.begin([IDS], source.numbers("model.embed_tokens.weight"))
    runner = LayerRunner(source.spec, source.tensors, 64)
    for index in range(source.spec.layers):
        streams = runner.run(index, source, streams)
    hidden = streams.hidden[0]
    gain = source.vector("model.norm.weight")
    normed = hidden * (hidden.square().mean(-1, keepdim=True) + source.spec.rms_eps).rsqrt() * gain
    found = normed @ source.numbers("lm_head.weight").T
    assert (found - logits(tmp_path)).abs().max() < 2e-2, "absorbed matrices are bf16 in one only"


@pytest.mark.parametrize("family", FAMILIES)
def test_folding_changes_no_output(family: str, tmp_path: Path) -> None:
    """Random powers of two in every fold: the layer computes the same."""
    source = SourceModel(resolve_source(str(write_source(tmp_path, family))))
    streams = Streams.begin(texts(1), source.numbers("model.embed_tokens.weight"))
    runner = LayerRunner(source.spec, source.tensors, 64)
    for index in range(2):
        changed, found = Changed(source), list(folds(runner.layer(index), source.spec))
        for fold in found:
            exponents = torch.randint(-3, 4, (fold.k,))
            if fold.repeats > 1:
                heads = exponents.view(-1, fold.repeats, fold.block)
                exponents = heads[:, :1].expand(heads.shape).flatten()
            changed.fold(fold, exponents.float().exp2())
        after = runner.run(index, changed, streams)
        streams = runner.run(index, source, streams)
        assert torch.allclose(after.hidden[0], streams.hidden[0], rtol=1e-4, atol=1e-4)
        name = runner.layer(index).mlp.norm.part
        folded = changed.copied(f"{name}.weight")
        assert folded.dtype is torch.bfloat16
        assert not torch.equal(folded, source.copied(f"{name}.weight"))


@pytest.mark.parametrize("family", FAMILIES)
def test_gptq_is_nearer_to_the_source_than_rounding(family: str, tmp_path: Path) -> None:
    source = small(tmp_path / "source", family)
    report = compress(source, tmp_path / "gptq", "int4:g64", method=Method.GPTQ, texts=texts())
    compress(source, tmp_path / "rtn", "int4:g64")
    assert distance(tmp_path / "gptq", source) < distance(tmp_path / "rtn", source)
    assert all(layer.output and layer.output < 0.2 for layer in report.layers)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_awq_is_nearer_where_some_inputs_are_far_greater(family: str, tmp_path: Path) -> None:
    """Random models have no such inputs, and nothing to gain from it; these get some."""
    source = small(tmp_path / "source", family, shards=1)
    weights = load_file(source / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith("layernorm.weight"):
            tensor[::16] *= 16
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    compress(source, tmp_path / "awq", "int4:g64", method=Method.AWQ, texts=texts())
    compress(source, tmp_path / "rtn", "int4:g64")
    assert distance(tmp_path / "awq", source) < 0.8 * distance(tmp_path / "rtn", source)


def distance(folder: Path, source: Path) -> float:
    return float((behind(folder) - behind(source)).square().mean())


def behind(folder: Path) -> Tensor:
    """Logits of texts like those of calibration, but others."""
    source, plan = resolve_source(str(folder)), PrecisionPlan.parse("fp32/fp32")
    model = load_models(source, plan, ReferenceOps()).decode
    held_out = texts(16)[12:]
    found = PagedRun(model).step({str(i): ids for i, ids in enumerate(held_out)})
    return torch.cat(list(found.values()))


def test_experts_that_saw_few_tokens_are_rounded_and_counted(tmp_path: Path) -> None:
    source = small(tmp_path / "source", "qwen3_moe")
    few = compress(source, tmp_path / "few", "int4:g32", method=Method.GPTQ, texts=texts(2, 32))
    assert any("fewer than" in note and "rounded to nearest" in note for note in few.notes)
    assert FEWEST > 2 * 32 * 3 / 8
    plain = SourceModel(resolve_source(str(tmp_path / "few")))
    compress(source, tmp_path / "rtn", "int4:g32")
    rounded = SourceModel(resolve_source(str(tmp_path / "rtn")))
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    assert torch.equal(plain.numbers(name), rounded.numbers(name))
    many = compress(source, tmp_path / "many", "int4:g32", method=Method.GPTQ, texts=texts(20, 64))
    assert not many.notes


class Stop(Exception):
    pass


@pytest.mark.parametrize("method", [Method.GPTQ, Method.AWQ])
def test_a_stopped_calibration_goes_on_to_the_same_bytes(method: Method, tmp_path: Path) -> None:
    source = small(tmp_path / "source", "glm_moe_dsa")
    options = {"method": method, "texts": texts(4), "shard_bytes": 60_000}
    compress(source, tmp_path / "whole", "int4:g32", **options)

    def stop(_stage: str, done: int, total: int) -> None:
        if done > 0.6 * total:
            raise Stop

    with pytest.raises(Stop):
        compress(source, tmp_path / "stopped", "int4:g32", progress=stop, **options)
    assert not (tmp_path / "stopped" / "config.json").exists()
    with pytest.raises(ConfigError, match="inputs"):
        compress(source, tmp_path / "stopped", "int4:g32", **options | {"texts": texts(5)})
    compress(source, tmp_path / "stopped", "int4:g32", **options)
    whole, stopped = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("whole", "stopped")
    )
    assert whole == stopped


def test_a_text_is_cut_into_pieces_of_which_the_last_are_held_out(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a" * 999)
    found = read_texts(path, lambda text: list(range(len(text))), tokens=128, vocab=999, longest=32)
    assert [len(piece) for piece in found.calibration] == [32] * 4
    assert found.held_out[0][0] == 896 and len(found.held_out) == 4
    assert max(piece[-1] for piece in found.calibration) < 896
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"tokens": [1, 2, 3]}\n' * 15 + '{"text": "a\u2028c"}\n')
    found = read_texts(lines, lambda text: [9] * len(text), tokens=9999, vocab=10, longest=32)
    assert found.calibration == ((1, 2, 3),) * 14 and found.held_out == ((1, 2, 3), (9, 9, 9))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"tokens": [1, 99]}', "ids below 10"),
        ("no json", "line 1"),
        ('{"text": "a"}', "longer"),
        ('{"text": "<pad>"}', "line 1: the tokenizer writes token 10, but the model has 10"),
    ],
)
def test_texts_that_cannot_be_used_are_refused(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_texts(path, lambda text: [1, 2 * len(text)], tokens=100, vocab=10, longest=32)


def test_methods_that_need_a_text_say_so(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    with pytest.raises(ConfigError, match="--calibration"):
        compress(source, tmp_path / "small", "int4:g32", method=Method.GPTQ)
