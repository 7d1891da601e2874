"""Two pools answer as the oracle does: one process that prefills, converts and decodes.

Bodies are compared whole, logprobs to the last bit, streams by what they add up to.
"""

import contextlib
from pathlib import Path

import pytest

from bifolio.checkpoint.source import resolve_source
from bifolio.config import EngineConfig, ServerConfig
from bifolio.request import Request, SamplingParams
from bifolio.text.tokenizer_files import load_text_side
from support.e2e_harness import serving_client
from support.local_pair import LocalPair
from support.oracle import Oracle
from support.pool_cases import cases, essence, streamed
from support.tiny import tiny_config, write_model

PUBLISHED = ("fp8/bf16", "int4:g32/fp8")
PLANS = [PUBLISHED, ("bf16/bf16", "int4:g32:a8/fp8:token")]
FAMILIES = [("llama", PLANS[0], 1), ("llama", PLANS[1], 3)]
FAMILIES += [("deepseek_v3", ("bf16/bf16", "int4:g32/bf16"), 16)]
"""Family, formats, and the share of the cases that are tried."""


def text_of(model):
    source = resolve_source(model)
    return load_text_side(source.gguf.metadata if source.is_gguf else source.path)


def settings(model):
    return ServerConfig(engine=EngineConfig(model=model), served_name="m")


@contextlib.asynccontextmanager
async def both(model, plan, **limits):
    """A server over the oracle and one over a pair of engines."""
    text = text_of(model)
    oracle, pair = Oracle(model, *plan), LocalPair(model, *plan, **limits)
    async with (
        serving_client(oracle, settings(model), text) as expected,
        serving_client(pair, settings(model), text) as found,
    ):
        yield oracle, pair, expected, found
    await pair.stop()


def all_cases(oracle, tokenizer):
    def tokens(text):
        prompt = tokenizer.encode(text, add_special_tokens=True)
        sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        request = Request(id="x", prompt_ids=prompt, sampling=sampling)
        return [token for output in oracle.answer(request) for token in output.tokens]

    return cases(
        lambda text: tokens(text)[0],
        lambda text: [tokenizer.decode([token]) for token in tokens(text)],
    )


async def compare(oracle, pair, expected, found, tokenizer, share=1):
    for path, body in all_cases(oracle, tokenizer)[::share]:
        one, other = [await s.post(path, **body) for s in (expected, found)]
        assert one.status_code == 200, one.text
        assert other.status_code == 200, other.text
        assert essence(one.text) == essence(other.text), body
        options = {"stream": True, "stream_options": {"include_usage": True}}
        one, other = [await s.post(path, **body, **options) for s in (expected, found)]
        assert streamed(one.text) == streamed(other.text), body
    for _ in range(5):
        pair.turn()
    pair.check_idle()


@pytest.mark.parametrize(("family", "plan", "share"), FAMILIES)
async def test_tiny_models_answer_as_the_oracle_does(family, plan, share, tmp_path):
    model = str(write_model(tmp_path, tiny_config(family)))
    async with both(model, plan, max_step_tokens=48) as (oracle, pair, expected, found):
        await compare(oracle, pair, expected, found, text_of(model).tokenizer, share)
        sent = pair.prefill.stats().handoff
        assert sent.delivered > 80 / share
        assert sent.known_pages > 0  # prompts came twice


@pytest.mark.soak
@pytest.mark.parametrize("plan", PLANS[:2], ids=" → ".join)
async def test_the_default_model_answers_all_cases_as_the_oracle_does(plan, smollm2):
    model = str(smollm2.path)
    limits = {"cache_memory": 2**28, "max_step_tokens": 64}
    async with both(model, plan, **limits) as (oracle, pair, expected, found):
        await compare(oracle, pair, expected, found, text_of(model).tokenizer)


@pytest.mark.soak
@pytest.mark.parametrize("plan", PLANS, ids=" → ".join)
async def test_the_trained_small_model_answers_all_cases_as_the_oracle_does(plan):
    model = str(Path(__file__).parents[1] / "checkpoint" / "tiny")
    async with both(model, plan, max_step_tokens=64) as (oracle, pair, expected, found):
        await compare(oracle, pair, expected, found, text_of(model).tokenizer)
