"""Nothing that old weights wrote is read by new ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bifolio.request import FinishReason, Request, SamplingParams
from support.rig import Rig
from support.scripted import ScriptedModel


def ask(name: str, max_tokens: int = 6, **sampling: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    return Request(id=name, prompt_ids=list(range(13)), sampling=params)


@pytest.mark.parametrize("phase", ["prefill_writer", "decode_writer"])
def test_a_prompt_is_cold_again_after_a_change_of_weights(phase: str) -> None:
    old = ScriptedModel()
    rig = Rig(model=old)
    rig.run(ask("first"))
    (warm,) = rig.run(ask("second"))
    assert warm.cached_tokens == 12
    new = replace(old, **{phase: 77})
    rig.change_model(new)
    (cold,) = rig.run(ask("third"))
    assert cold.cached_tokens == 0
    assert cold.tokens == new.expected_answer(ask("third"))
    assert cold.tokens != warm.tokens


def test_running_requests_start_over_and_keep_what_they_have_said() -> None:
    old = ScriptedModel()
    rig = Rig(model=old)
    rig.add(ask("a"), ask("b", prompt_logprobs=1))
    rig.step()
    new = replace(old, prefill_writer=7, decode_writer=8)
    rig.change_model(new)
    assert rig.pool.free == rig.pool.num_pages
    step = rig.schedule()
    assert step is not None and step.rows[0].start == 0
    assert step.rows[0].end == 14, "the prompt and the token that the old weights chose"
    rig.commit(step, rig.runner.execute(step))
    rig.run()
    assert all(len(a.tokens) == 6 and a.finish is FinishReason.LENGTH for a in rig.answers.values())
    assert rig.answers["a"].tokens[0] == old.expected_answer(ask("a"))[0]


def test_prompt_logprobs_are_of_one_set_of_weights() -> None:
    rig = Rig()
    request = ask("long", 2, prompt_logprobs=3)
    long = Request(id="long", prompt_ids=list(range(40)), sampling=request.sampling)
    rig.add(long)
    rig.step()
    new = ScriptedModel(prefill_writer=5, decode_writer=5)
    rig.change_model(new)
    rig.run()
    assert rig.answers["long"].prompt_logprobs == new.expected_prompt_logprobs(long)
