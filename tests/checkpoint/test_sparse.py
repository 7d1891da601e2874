"""What GLM and DeepSeek have beside experts: sparse attention, and layers that nobody serves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bifolio.checkpoint.load import Model, load_models
from bifolio.checkpoint.source import resolve_source
from bifolio.errors import CheckpointError
from bifolio.formats import PrecisionPlan
from bifolio.kernels.reference import ReferenceOps
from support.forward import PagedRun
from support.tiny import random_weights, tiny_config, write_model, write_weights

TOP_K = 24


def model_in(folder: Path) -> Model:
    source = resolve_source(str(folder))
    return load_models(source, PrecisionPlan.parse("fp32/fp32"), ReferenceOps()).decode


def random_ids(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 320, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config("glm_moe_dsa", index_topk=TOP_K)
    return write_model(tmp_path_factory.mktemp("glm"), config, tokenizer=False)


@pytest.mark.parametrize("length", [TOP_K - 1, TOP_K, TOP_K + 1, 2 * TOP_K + 1])
def test_sparse_attention_holds_at_the_border_of_its_choice(length: int, glm: Path) -> None:
    ids = random_ids(length, length)
    run = PagedRun(model_in(glm))
    ours = torch.cat([run.step({"a": [i]})["a"] for i in ids])
    judge = AutoModelForCausalLM.from_pretrained(
        glm, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        wanted = judge(torch.tensor([ids])).logits[0]
    assert (ours - wanted).abs().max() < 1e-4


def test_attention_is_dense_up_to_its_choice_and_sparse_beyond(glm: Path, tmp_path: Path) -> None:
    dense = write_model(tmp_path, tiny_config("glm_moe_dsa", index_topk=512), tokenizer=False)
    ids = random_ids(60, 1)
    sparse_logits, dense_logits = (
        PagedRun(model_in(folder)).step({"a": ids})["a"] for folder in (glm, dense)
    )
    moved = (sparse_logits - dense_logits).abs().amax(dim=1)
    assert moved[:TOP_K].max() < 1e-5
    assert moved[TOP_K:].min() > 1e-3


@pytest.mark.parametrize("family", ["deepseek_v3", "glm_moe_dsa"])
def test_layers_that_predict_further_tokens_stay_unread_but_named(
    family: str, tmp_path: Path
) -> None:
    served = tiny_config(family)
    longer = served | {"num_hidden_layers": 5}
    if family == "glm_moe_dsa":
        longer["indexer_types"] = [*served["indexer_types"], "full"]
    weights = random_weights(served)
    extra = {name: t for name, t in random_weights(longer).items() if ".layers.4." in name}
    extra |= {
        f"model.layers.4.{part}.weight": torch.ones(64)
        for part in ("enorm", "hnorm", "shared_head.norm")
    }
    extra["model.layers.4.eh_proj.weight"] = torch.ones(64, 128)
    ids = random_ids(20, 2)
    folder = write_model(tmp_path, served | {"num_nextn_predict_layers": 1}, tokenizer=False)
    plain = PagedRun(model_in(folder)).step({"a": ids})["a"]
    write_weights(folder, weights | extra)
    assert torch.equal(PagedRun(model_in(folder)).step({"a": ids})["a"], plain)
    write_weights(folder, weights | extra | {"model.layers.4.eh_prj.weight": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"no use.*layers\.4\.eh_prj"):
        model_in(folder)
