"""Whatever the scheduler does to a request, its answer is that of an undisturbed engine."""

from __future__ import annotations

import random

import pytest

from bifolio.request import FinishReason, Request, SamplingParams
from bifolio.scheduler.limits import SchedulerLimits
from support.rig import Rig
from support.scripted import ScriptedModel


def mixed_requests(rng: random.Random, count: int, longest: int) -> list[Request]:
    """Requests of two tenants that share beginnings, with every end rule among them."""
    bases = [[rng.randrange(50) for _ in range(30)] for _ in range(3)]
    requests = []
    for i in range(count):
        tail = [rng.randrange(50) for _ in range(rng.randrange(3))]
        prompt = rng.choice(bases)[: rng.randrange(1, 28)] + tail
        sampling = SamplingParams(
            max_tokens=rng.randrange(1, longest - len(prompt) + 1),
            ignore_eos=rng.random() < 0.5,
            seed=rng.randrange(3),
            logprobs=rng.choice([None, 1]),
            prompt_logprobs=rng.choice([None, None, 2]),
        )
        salt = rng.choice("ab")
        requests.append(
            Request(id=str(i), prompt_ids=prompt, tenant=salt, cache_salt=salt, sampling=sampling)
        )
    return requests


@pytest.mark.parametrize("decode_writer", [1, 2], ids=["one-writer", "two-writers"])
@pytest.mark.parametrize("pages", [12, 20, 64])
@pytest.mark.parametrize("step_tokens", [6, 16, 64])
def test_answers_do_not_depend_on_pool_chunks_or_neighbours(
    pages: int, step_tokens: int, decode_writer: int
) -> None:
    model = ScriptedModel(vocab=50, decode_writer=decode_writer, stop_ids=frozenset([7]))
    limits = SchedulerLimits(max_model_len=48, max_num_seqs=6, max_step_tokens=step_tokens)
    rig = Rig(pages=pages, page_size=4, model=model, limits=limits)
    requests = mixed_requests(random.Random(pages * step_tokens + decode_writer), 20, 48)
    for request, answer in zip(requests, rig.run(*requests), strict=True):
        assert answer.tokens == model.expected_answer(request)
        stopped = answer.tokens[-1] == 7 and not request.sampling.ignore_eos
        assert answer.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert answer.stop_id == (7 if stopped else None)
        assert len(answer.logprobs) == (len(answer.tokens) if request.sampling.logprobs else 0)
        if request.sampling.prompt_logprobs is not None:
            assert answer.prompt_logprobs == model.expected_prompt_logprobs(request)
    rig.check_idle()
    assert rig.scheduler.stats().finished == 20
    assert pages > 12 or rig.scheduler.stats().preemptions, "the pool was meant to be too small"


@pytest.mark.parametrize("length", sorted({4 * k + d for k in range(1, 5) for d in (-1, 0, 1)}))
@pytest.mark.parametrize("decode_writer", [1, 2], ids=["one-writer", "two-writers"])
def test_prompts_around_page_borders_answer_alike_cold_warm_and_beside_a_cancelled_twin(
    length: int, decode_writer: int
) -> None:
    model = ScriptedModel(vocab=50, decode_writer=decode_writer)
    limits = SchedulerLimits(max_model_len=48, max_num_seqs=4, max_step_tokens=8)
    rig = Rig(pages=20, page_size=4, model=model, limits=limits)
    prompt = [(7 * i) % 50 for i in range(length)]

    def request(name: str) -> Request:
        return Request(id=name, prompt_ids=prompt, sampling=SamplingParams(max_tokens=9))

    expected = model.expected_answer(request("any"))
    (cold,) = rig.run(request("cold"))
    (warm,) = rig.run(request("warm"))
    assert cold.tokens == warm.tokens == expected
    assert (cold.cached_tokens, warm.cached_tokens) == (0, (length - 1) // 4 * 4)
    for steps_before in range(4):
        twin, kept = f"twin {steps_before}", f"kept {steps_before}"
        rig.add(request(twin), request(kept))
        for _ in range(steps_before):
            rig.step()
        rig.abort(twin)
        rig.run()
        assert rig.answers[kept].tokens == expected
        (retry,) = rig.run(request(f"retry {steps_before}"))
        assert retry.tokens == expected
    rig.check_idle()
