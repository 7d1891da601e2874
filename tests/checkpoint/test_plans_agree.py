"""The planner and the loader mean the same by a plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bifolio.checkpoint.effective_formats import EffectiveFormats
from bifolio.checkpoint.load import load_models
from bifolio.checkpoint.source import resolve_source
from bifolio.formats import BF16, PhasePlan, PrecisionPlan
from bifolio.kernels.reference import ReferenceOps
from bifolio.lab.plan.storage import Storage, planned
from bifolio.spec.weights import Kind
from support.tiny import tiny_config, write_model

PLANS = [
    "int4:g32/bf16",
    "fp8/fp8",
    "auto/bf16",
    "weights=bf16,experts=int4:g32",
    "experts=int4:g32:a8",
    "weights=int8,experts=int4:g64,head=bf16",
]


@pytest.mark.parametrize("text", PLANS)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_formats_in_fact_are_those_that_were_planned(
    family: str, text: str, tmp_path: Path
) -> None:
    write_model(tmp_path, tiny_config(family), dtype=torch.bfloat16, tokenizer=False)
    source, plan = resolve_source(str(tmp_path)), PrecisionPlan.parse(text)
    models = load_models(source, plan, ReferenceOps())
    found = EffectiveFormats.of(models.decode.decoder)
    wanted = planned(source.spec, plan.decode, Storage((), "bf16"))
    assert found.layers == (str(wanted.kind(Kind.ATTENTION)),)
    assert found.head == str(wanted.kind(Kind.HEAD))
    if source.spec.moe is not None:
        assert found.experts == (str(wanted.kind(Kind.ROUTED_EXPERTS)),)
    if source.spec.moe is not None and source.spec.moe.shared:
        assert found.layers == (str(wanted.kind(Kind.SHARED_EXPERTS)),)
    if source.spec.mla is not None:
        layer = models.decode.decoder.layers[0].attention
        assert {str(weight.format) for weight in layer.k_up} == {str(BF16)}


def test_a_plan_with_experts_is_spelled_as_it_is_read() -> None:
    plan = PrecisionPlan.parse("weights=fp8,experts=int4:g32,cache=fp8,head=int8").decode
    assert PrecisionPlan.parse(str(plan)).decode == plan
    assert plan != PhasePlan(plan.weights, plan.cache, plan.head)
