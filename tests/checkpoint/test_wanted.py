"""Logits that are asked for have the same bits whether or not others are asked for too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bifolio.checkpoint.load import Model, load_models
from bifolio.checkpoint.source import resolve_source
from bifolio.formats import PrecisionPlan
from bifolio.kernels.native import NativeOps
from bifolio.kernels.reference import ReferenceOps
from support.forward import PagedRun
from support.tiny import tiny_config, write_model

CHUNKS = {"a": list(range(3, 40)), "b": [7], "c": list(range(100, 120))}
ALL = slice(None)
CASES = {
    "the last token of each": {"a": slice(-1, None), "b": ALL, "c": slice(-1, None)},
    "some of the last tokens": {"a": slice(5, None), "c": slice(-3, None)},
    "one sequence": {"c": ALL},
    "none": {},
    "not the last ones": {"a": slice(3, 9), "b": ALL, "c": slice(0, 1)},
}


class CountingOps(NativeOps):
    """Notes of how many tokens each attention has queries."""

    def __init__(self) -> None:
        super().__init__(threads=2)
        self.rows: list[int] = []

    def attention(self, q_thd: Tensor, *args: Any, **options: Any) -> Tensor:
        self.rows.append(q_thd.shape[0])
        return super().attention(q_thd, *args, **options)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3", "glm_moe_dsa"])
def test_logits_do_not_depend_on_which_others_are_wanted(family: str, tmp_path: Path) -> None:
    source = resolve_source(str(write_model(tmp_path, tiny_config(family))))
    models = load_models(source, PrecisionPlan.parse("bf16/bf16"), NativeOps(2), positions=64)
    every = {n: t.clone() for n, t in PagedRun(models.decode).step(CHUNKS).items()}
    for case, wanted in CASES.items():
        run = PagedRun(models.decode)
        some = {n: t.clone() for n, t in run.step(CHUNKS, wanted).items()}
        for name, logits in every.items():
            expected = logits[wanted.get(name, slice(0))]
            assert torch.equal(some[name], expected), (case, name)
        # what the step left in its pages is the same too
        assert torch.equal(run.step({"a": [9]})["a"], _after(models.decode)), case


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "glm_moe_dsa"])
def test_the_reference_leaves_out_the_same_tokens(family: str, tmp_path: Path) -> None:
    source = resolve_source(str(write_model(tmp_path, tiny_config(family))))
    models = load_models(source, PrecisionPlan.parse("fp32/fp32"), ReferenceOps(), positions=64)
    every = PagedRun(models.decode).step(CHUNKS)
    for case, wanted in CASES.items():
        some = PagedRun(models.decode).step(CHUNKS, wanted)
        for name, logits in every.items():
            expected = logits[wanted.get(name, slice(0))]
            assert torch.allclose(some[name], expected, atol=1e-4), (case, name)


def _after(model: Model) -> Tensor:
    run = PagedRun(model)
    run.step(CHUNKS)
    return run.step({"a": [9]})["a"].clone()


def test_behind_the_last_keys_only_wanted_tokens_are_computed(tmp_path: Path) -> None:
    source = resolve_source(str(write_model(tmp_path, tiny_config("llama"))))
    ops = CountingOps()
    models = load_models(source, PrecisionPlan.parse("bf16/bf16"), ops, positions=64)
    PagedRun(models.decode).step(CHUNKS, CASES["the last token of each"])
    assert ops.rows == [58] * (len(ops.rows) - 1) + [3]
