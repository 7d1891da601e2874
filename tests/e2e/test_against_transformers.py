"""The default model, greedy, in float32: our tokens are the tokens of `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bifolio.checkpoint.source import ModelSource
from bifolio.config import EngineConfig
from bifolio.engine.engine import Engine
from bifolio.formats import PrecisionPlan
from bifolio.request import Request, SamplingParams
from bifolio.text.tokenizer_gguf import tokenizer_from_gguf

LENGTHS = (5, 6, 7, 9, 12, 15, 16, 17, 31, 32, 33, 47, 64, 100, 129, 200, 333, 512)
"""Prompt lengths in tokens, borders of pages of 16 among them, up to four steps."""

LONG = (1000, 1500)
STEP_TOKENS = 128
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def oracle(smollm2: ModelSource) -> PreTrainedModel:
    """The same GGUF file, dequantised by transformers to float32."""
    return AutoModelForCausalLM.from_pretrained(
        smollm2.path.parent, gguf_file=smollm2.path.name, dtype=torch.float32
    ).eval()


def prompts(smollm2: ModelSource, lengths: tuple[int, ...]) -> list[list[int]]:
    tokenizer = tokenizer_from_gguf(smollm2.gguf.metadata)
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    ids = tokenizer.encode(text)
    return [ids[37 * i : 37 * i + length] for i, length in enumerate(lengths)]


def answers(smollm2: ModelSource, kernels: str, asked: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of the engine, all prompts at once."""
    plan = PrecisionPlan.parse("fp32/fp32")
    engine = Engine(
        EngineConfig(
            model=str(smollm2.path),
            plan=plan,
            kernels=kernels,
            cache_memory=2**29,
            max_model_len=2048,
            max_step_tokens=STEP_TOKENS,
        )
    )
    sampling = SamplingParams(max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS, temperature=0.0)
    found: dict[str, list[int]] = {str(i): [] for i in range(len(asked))}
    for name, prompt in zip(found, asked, strict=True):
        engine.add(Request(id=name, prompt_ids=prompt, sampling=sampling))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            found[output.id].extend(output.tokens)
    engine.scheduler.check_invariants()
    return list(found.values())


@torch.inference_mode()
def is_greedy(oracle: PreTrainedModel, prompt: list[int], answer: list[int]) -> bool:
    """Whether each token is the oracle's best behind the ones before it: one pass for all.

    Its end token is out of the question, as with `min_new_tokens`.
    """
    assert len(answer) == NEW_TOKENS
    ids = torch.tensor([[*prompt, *answer[:-1]]])
    logits = oracle(ids, logits_to_keep=NEW_TOKENS).logits[0]
    logits[:, oracle.config.eos_token_id] = -torch.inf
    return logits.argmax(dim=-1).tolist() == answer


@pytest.mark.parametrize(
    ("kernels", "lengths"),
    [
        ("native", LENGTHS),
        pytest.param("native", LONG, marks=pytest.mark.soak),
        pytest.param("reference", LENGTHS + LONG, marks=pytest.mark.soak),
    ],
    ids=["native", "native, long", "reference"],
)
def test_greedy_tokens_equal_those_of_transformers(
    kernels: str, lengths: tuple[int, ...], smollm2: ModelSource, oracle: PreTrainedModel
) -> None:
    """The kernels that serve; the reference is also held to transformers' logits elsewhere."""
    asked = prompts(smollm2, lengths)
    found = answers(smollm2, kernels, asked)
    wrong = [
        len(prompt)
        for prompt, answer in zip(asked, found, strict=True)
        if not is_greedy(oracle, prompt, answer)
    ]
    assert wrong == [], "prompts of these lengths differ"
