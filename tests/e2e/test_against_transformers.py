"""The default model, greedy, in float32: our tokens are the tokens of `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from bifolio.config import EngineConfig
from bifolio.engine.engine import Engine
from bifolio.formats import PrecisionPlan
from bifolio.models.source import ModelSource
from bifolio.request import Request, SamplingParams

LENGTHS = (5, 6, 7, 9, 12, 15, 16, 17, 31, 32, 33, 47, 64, 100, 129, 200, 333, 512, 1000, 1500)
"""Prompt lengths in tokens, borders of pages of 16 among them."""

NEW_TOKENS = 24


@pytest.fixture(scope="module")
def oracle(smollm2: ModelSource) -> PreTrainedModel:
    """The same GGUF file, dequantised by transformers to float32."""
    return AutoModelForCausalLM.from_pretrained(
        smollm2.path.parent, gguf_file=smollm2.path.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def prompts(smollm2: ModelSource) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(smollm2.path.parent, gguf_file=smollm2.path.name)
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return [ids[37 * i : 37 * i + length] for i, length in enumerate(LENGTHS)]


def expected(oracle: PreTrainedModel, prompt: list[int]) -> list[int]:
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        out = oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


@pytest.mark.timeout(400)
def test_greedy_tokens_equal_those_of_transformers(
    smollm2: ModelSource, oracle: PreTrainedModel, prompts: list[list[int]]
) -> None:
    engine = Engine(
        EngineConfig(
            model=str(smollm2.path),
            plan=PrecisionPlan.parse("fp32/fp32"),
            kernels="reference",
            cache_memory=2**29,
            max_model_len=2048,
            max_step_tokens=512,
        )
    )
    sampling = SamplingParams(max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS, temperature=0.0)
    found: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        engine.add(Request(id=str(i), prompt_ids=prompt, sampling=sampling))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            found.setdefault(output.id, []).extend(output.tokens)
    engine.scheduler.check_invariants()
    wrong = [
        length
        for i, (length, prompt) in enumerate(zip(LENGTHS, prompts, strict=True))
        if found[str(i)] != expected(oracle, prompt)
    ]
    assert wrong == [], "prompts of these lengths differ"
