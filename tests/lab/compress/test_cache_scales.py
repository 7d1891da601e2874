"""Static scales of an fp8 cache: measured, written, read back, and used on every path."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bifolio.checkpoint.load import LoadedModels, load_models
from bifolio.checkpoint.source import resolve_source
from bifolio.config import EngineConfig
from bifolio.engine.engine import Engine
from bifolio.errors import CheckpointError
from bifolio.formats import CacheFormat, Phase, PrecisionPlan
from bifolio.kernels import paged
from bifolio.kernels.latent_pages import read_latents
from bifolio.kernels.ops import LayerCache
from bifolio.kernels.reference import ReferenceOps
from bifolio.lab.compress.cache_calibration import MARGIN, measure_scales
from bifolio.lab.compress.scale_files import SCALES_FILE, write_scales
from bifolio.lab.compress.source_model import SourceModel
from support.compressed_checkpoints import IDS, compress, write_source
from support.forward import PagedRun

FP8 = CacheFormat.parse("fp8")
TEXTS = [IDS, list(range(40, 100))]


def calibrated(folder: Path, family: str = "llama", **options: bool) -> Path:
    source = SourceModel(resolve_source(str(write_source(folder, family))))
    write_scales(source, measure_scales(source, TEXTS, **options))
    return folder


def load(folder: Path) -> LoadedModels:
    return load_models(resolve_source(str(folder)), PrecisionPlan.parse("fp32/fp8"), ReferenceOps())


def run(models: LoadedModels, cache: CacheFormat, *, scaled: bool = True) -> Tensor:
    scales = models.cache_scales if scaled else None
    return PagedRun(models.decode, cache=cache, scales=scales).step({"a": IDS})["a"]


def seen(plain: PagedRun, cache: LayerCache) -> Iterator[tuple[Tensor, Tensor]]:
    """Of both texts the greatest keys and values by head."""
    for name in "ab":
        if cache.spec.latent is not None:
            greatest = read_latents(cache, *plain.pages(name)).abs().amax().view(1)
            yield greatest, greatest
        else:
            k_thd, v_thd = paged.read(cache, *plain.pages(name))
            yield k_thd.abs().amax(dim=(0, 2)), v_thd.abs().amax(dim=(0, 2))


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "glm_moe_dsa"])
def test_scales_are_read_back_and_span_what_the_cache_holds(family: str, tmp_path: Path) -> None:
    folder = calibrated(tmp_path, family)
    models = load(folder)
    scales = models.cache_scales
    assert scales is not None
    plain = PagedRun(models.decode, pages=8)
    plain.step({"a": TEXTS[0], "b": TEXTS[1]})
    for layer, cache in enumerate(plain.caches):
        k_h, v_h = (torch.stack(one).amax(dim=0) for one in zip(*seen(plain, cache), strict=True))
        assert torch.allclose(scales.k_lh[layer] * 448 / MARGIN, k_h, rtol=1e-3)
        assert torch.allclose(scales.v_lh[layer] * 448 / MARGIN, v_h, rtol=1e-3)


@pytest.mark.parametrize(("family", "factor"), [("llama", 2.0**-14), ("deepseek_v3", 2.0**-12)])
def test_scales_rescue_numbers_that_e4m3_cannot_hold(
    family: str, factor: float, tmp_path: Path
) -> None:
    """Tiny values would all become zero; with their scales they keep their precision."""
    folder = write_source(tmp_path, family, shards=1)
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name, tensor in weights.items():
        if name.endswith(("v_proj.weight", "kv_a_layernorm.weight")):
            weights[name] = tensor * factor
        if name.endswith(("o_proj.weight",)):
            weights[name] = tensor / factor
    save_file(weights, file, metadata={"format": "pt"})
    source = SourceModel(resolve_source(str(folder)))
    write_scales(source, measure_scales(source, TEXTS))
    models = load(folder)
    exact = run(models, CacheFormat.parse("fp32"), scaled=False)
    with_scales = (run(models, FP8) - exact).square().mean().sqrt()
    without = (run(models, FP8, scaled=False) - exact).square().mean().sqrt()
    assert with_scales < 0.25 * without


def test_one_scale_for_all_heads_is_written_as_one_number(tmp_path: Path) -> None:
    folder = calibrated(tmp_path, by_head=False)
    stored = load_file(folder / SCALES_FILE)
    assert {tuple(tensor.shape) for tensor in stored.values()} == {(1,)}
    scheme = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert scheme["kv_cache_scheme"]["strategy"] == "tensor"
    scales = load(folder).cache_scales
    assert scales is not None and torch.equal(scales.k_lh[:, :1], scales.k_lh[:, 1:])


def test_scales_by_head_are_written_as_others_read_them(tmp_path: Path) -> None:
    """Shapes of compressed-tensors' strategy `attn_head`: [kv_heads, 1, 1]."""
    folder = calibrated(tmp_path)
    stored = load_file(folder / SCALES_FILE)
    assert set(stored) == {
        f"model.layers.{i}.self_attn.{which}_scale" for i in range(4) for which in "kv"
    }
    assert {tuple(tensor.shape) for tensor in stored.values()} == {(2, 1, 1)}


def test_calibrating_again_replaces_the_scales_and_nothing_else(tmp_path: Path) -> None:
    folder = calibrated(tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    source = SourceModel(resolve_source(str(folder)))
    write_scales(source, measure_scales(source, TEXTS[:1]))
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {n for n in before if before[n] != after[n]} == {SCALES_FILE}


def test_compression_takes_the_scales_along(tmp_path: Path) -> None:
    folder = calibrated(tmp_path / "source")
    compress(folder, tmp_path / "small", "int8")
    one, other = load(folder).cache_scales, load(tmp_path / "small").cache_scales
    assert one is not None and other is not None and one.digest == other.digest
    config = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"]["strategy"] == "attn_head"
    assert config["ignore"] == ["lm_head"]


def with_scale(folder: Path, name: str, tensor: Tensor | None) -> Path:
    stored = load_file(folder / SCALES_FILE)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    if tensor is None:
        del stored[name], index["weight_map"][name]
    else:
        stored[name] = tensor
    save_file(stored, folder / SCALES_FILE)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (None, "missing"),
        (torch.tensor([1.0, -1.0]), "positive"),
        (torch.tensor([torch.nan]), "positive"),
        (torch.ones(3), "3 numbers"),
    ],
)
def test_scales_that_are_not_sound_stop_the_start(
    tensor: Tensor | None, why: str, tmp_path: Path
) -> None:
    name = "model.layers.2.self_attn.v_scale"
    folder = with_scale(calibrated(tmp_path), name, tensor)
    with pytest.raises(CheckpointError, match=rf"{name}.*{why}"):
        load(folder)


def test_the_engine_uses_them_and_its_pages_are_told_from_others(tmp_path: Path) -> None:
    def engine(plan: str) -> Engine:
        config = {"model": str(tmp_path), "plan": PrecisionPlan.parse(plan), "cache_memory": 2**22}
        return Engine(EngineConfig.model_validate(config))

    calibrated(tmp_path)
    found = engine("auto/fp8")
    assert found.pool.scales is not None
    caches = found.pool.layers()
    assert all(cache.k_scales is not None and cache.v_scales is not None for cache in caches)
    scales = found.models.cache_scales
    assert scales is not None and torch.equal(caches[1].k_scales, scales.k_lh[1])
    found.pool.scales = None
    others = found.writer(Phase.PREFILL)
    found.pool.scales = scales
    assert found.writer(Phase.PREFILL) != others
    assert engine("auto/bf16").pool.scales is None
    assert engine("auto/fp8:token").pool.scales is None
