"""Experts and latent attention keep the promise too: a row's bits depend on the row alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.logit_bits import alone, differing, engine_for, prompts_of, run
from support.tiny import tiny_config, write_model

LENGTHS = (1, 16, 17, 33, 48, 50)


@pytest.mark.parametrize("plan", ["bf16/bf16", "int4:g32:a8/fp8:token"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "glm_moe_dsa"])
def test_neighbours_chunks_hits_and_preemption_change_no_bit(
    family: str, plan: str, tmp_path: Path
) -> None:
    model = str(write_model(tmp_path, tiny_config(family)))
    prompts = prompts_of(LENGTHS, 320)
    solo = alone(engine_for(model, {"plan": plan}), prompts)
    engine = engine_for(model, {"plan": plan})
    assert differing(solo, run(engine, prompts)) == []
    assert differing(solo, run(engine, prompts)) == []
    assert engine.stats().hit_tokens > 100
    chunked = engine_for(model, {"plan": plan}, max_step_tokens=19, threads=1)
    assert differing(solo, run(chunked, prompts, preempt_every=5)) == []
    assert chunked.stats().preemptions > 0
