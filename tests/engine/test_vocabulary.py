"""Engines over checkpoints with rows that have no token, and with weights that are no numbers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
from torch import Tensor

from bifolio.checkpoint.token_ids import TokenIds
from bifolio.config import EngineConfig
from bifolio.engine.engine import Engine
from bifolio.engine.sampler import Sampler
from bifolio.errors import RequestError
from bifolio.formats import PrecisionPlan
from bifolio.lab.eval.forced import ForcedText
from bifolio.request import ErrorCode, FinishReason, Output, Request, SamplingParams
from support.local_pair import LocalPair
from support.tiny import build_tokenizer, random_weights, tiny_config, write_model, write_weights

CONFIG = tiny_config("llama")
ROWS = CONFIG["vocab_size"]
TOKENS = build_tokenizer(0).get_vocab_size()
KERNELS = ("native", "reference")
ANSWER = 5


def write(folder: Path, change: Callable[[dict[str, Tensor]], object], tokens: int = ROWS) -> str:
    """A tiny model with changed weights, whose tokenizer has `tokens` tokens."""
    write_model(folder, CONFIG, tokenizer=False)
    weights = random_weights(CONFIG)
    change(weights)
    write_weights(folder, weights)
    build_tokenizer(tokens).save(str(folder / "tokenizer.json"))
    return str(folder)


def start(model: str, kernels: str = "native", **options: Any) -> Engine:
    fields = {"cache_memory": 2**21, "max_model_len": 128, "threads": 1, "kernels": kernels}
    plan = PrecisionPlan.parse("bf16/bf16")
    return Engine(EngineConfig(model=model, plan=plan, **(fields | options)))


def requests(count: int, **sampling: Any) -> list[Request]:
    """Prompts that name ids with and without a token."""
    fields = {"max_tokens": ANSWER, "temperature": 0.0, "ignore_eos": True} | sampling
    return [
        Request(
            id=f"r{i}",
            prompt_ids=[(7 * i + 3 * j) % ROWS for j in range(9)],
            sampling=SamplingParams(**({"seed": i} | fields)),
        )
        for i in range(count)
    ]


def of_every_kind() -> list[Request]:
    """Requests that are sampled by different rules."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2},
        {"logprobs": 20, "prompt_logprobs": 3},
    ]
    return [requests(i + 1, **kind)[i] for i, kind in enumerate(kinds)]


def run(engine: Engine, asked: list[Request]) -> dict[str, list[Output]]:
    news: dict[str, list[Output]] = {request.id: [] for request in asked}
    for request in asked:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            news[output.id].append(output)
    return news


def tokens_of(news: dict[str, list[Output]]) -> list[int]:
    return [token for outputs in news.values() for output in outputs for token in output.tokens]


# ── rows without a token ─────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that says little but what its tokenizer has no token for."""

    def shout(weights: dict[str, Tensor]) -> None:
        weights["lm_head.weight"][TOKENS:] *= 30

    return write(tmp_path_factory.mktemp("padded"), shout, TOKENS)


@pytest.mark.parametrize("kernels", KERNELS)
def test_no_row_without_a_token_is_chosen_first_later_alone_or_together(
    padded: str, kernels: str
) -> None:
    engine = start(padded, kernels)
    for asked in (requests(1), requests(3), of_every_kind()):
        news = run(engine, asked)
        tokens = tokens_of(news)
        assert len(tokens) == ANSWER * len(asked)
        assert max(tokens) < TOKENS
        tops = [lp.top for o in news.values() for one in o for lp in one.logprobs or ()]
        assert all(i < TOKENS for top in tops for i, _ in top)
    engine.runner.sampler = Sampler(engine.kernels.sampling, (), TokenIds(ROWS))
    assert max(tokens_of(run(engine, requests(1)))) >= TOKENS, "the model would say them"


def test_nor_is_it_by_two_pools(padded: str) -> None:
    pair = LocalPair(padded, "bf16/bf16", "bf16/bf16", max_model_len=128)

    async def read() -> list[int]:
        return [t async for output in pair.generate(*requests(3)) for t in output.tokens]

    tokens = asyncio.run(read())
    assert tokens and max(tokens) < TOKENS
    assert sorted(tokens) == sorted(tokens_of(run(start(padded), requests(3))))


def test_a_text_is_scored_among_the_tokens_that_there_are(padded: str) -> None:
    engine = start(padded, prefix_cache=False)
    (found,) = ForcedText(engine).likelihoods([5, 6, 7], [[8, 9]])
    prompt = Request(
        id="p",
        prompt_ids=[5, 6, 7, 8, 9],
        sampling=SamplingParams(max_tokens=1, prompt_logprobs=0),
    )
    served = run(engine, [prompt])["p"][0].prompt_logprobs
    assert served is not None
    likely = [one.logprob for one in served if one is not None][-2:]
    assert found.logprob == pytest.approx(sum(likely), abs=1e-5)
    for missing in (ROWS, -1):
        with pytest.raises(RequestError, match=f"token id {missing}"):
            ForcedText(engine).likelihoods([5, missing], [[8]])


# ── logits that are not finite ───────────────────────────────────────────────────────────────


def spoil(name: str, value: float) -> Callable[[dict[str, Tensor]], object]:
    return lambda weights: weights[name].view(-1)[:1].fill_(value)


DAMAGE = {
    "an infinite gain of the last norm": spoil("model.norm.weight", math.inf),
    "one weight of the head": spoil("lm_head.weight", -math.inf),
    "one gain of a layer": spoil("model.layers.1.input_layernorm.weight", math.nan),
}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_logits_that_are_not_finite_end_every_request_that_meets_them(
    tmp_path: Path, kernels: str, damage: str
) -> None:
    engine = start(write(tmp_path, DAMAGE[damage]), kernels)
    asked = of_every_kind()
    with structlog.testing.capture_logs() as logs:
        news = run(engine, asked)
    for outputs in news.values():
        (only,) = outputs
        assert (only.finish, only.error_code) == (FinishReason.ERROR, ErrorCode.INTERNAL)
        assert not only.tokens and not only.logprobs
        assert only.error is not None and "are not all finite" in only.error
    assert engine.stats().logits_faults == len(asked)
    named = [entry["request"] for entry in logs if entry["event"] == "logits that are not finite"]
    assert sorted(named) == sorted(request.id for request in asked)


def test_a_row_without_a_token_may_hold_anything(tmp_path: Path) -> None:
    def damage(weights: dict[str, Tensor]) -> None:
        weights["lm_head.weight"][TOKENS:] = math.nan

    engine = start(write(tmp_path, damage, TOKENS))
    assert len(tokens_of(run(engine, requests(2, temperature=1.0)))) == 2 * ANSWER
    assert engine.stats().logits_faults == 0
