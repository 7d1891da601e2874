"""A page that is not what its request wrote ends that request, and nothing else."""

from __future__ import annotations

import pytest

from bifolio.cache.stamps import PageFault
from bifolio.request import ErrorCode, FinishReason, Request, SamplingParams
from bifolio.scheduler.limits import SchedulerLimits
from bifolio.scheduler.step import LogitsFault, RowResult, Step
from support.rig import Rig
from support.scripted import ScriptedModel, WrongContentError

LIMITS = SchedulerLimits(max_model_len=64, max_num_seqs=8, max_step_tokens=64)


def ask(name: str, prompt: list[int], max_tokens: int = 8) -> Request:
    return Request(id=name, prompt_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens))


def rows_of(step: Step | None) -> dict[str, list[int]]:
    assert step is not None
    return {row.request_id: list(row.page_ids) for row in step.rows}


def test_an_overwritten_page_ends_its_request_and_is_never_used_again() -> None:
    model = ScriptedModel()
    rig = Rig(pages=24, limits=LIMITS, model=model)
    neighbours = [ask(f"n{i}", [10 * i + j for j in range(9)]) for i in range(3)]
    victim = ask("victim", list(range(100, 109)))
    rig.add(*neighbours, victim)
    rig.step()
    step = rig.schedule()
    page = rows_of(step)["victim"][1]
    rig.runner.overwrite(page)
    assert step is not None
    rig.commit(step, rig.runner.execute(step))
    answer = rig.answers["victim"]
    assert (answer.finish, answer.error_code) == (FinishReason.ERROR, ErrorCode.CACHE_INTEGRITY)
    assert answer.error is not None and f"cache page {page} carries tag" in answer.error
    assert len(answer.tokens) == 1, "the token of the step with the fault was not sent"
    rig.run(*(ask(f"later{i}", [500 + 20 * i + j for j in range(20)]) for i in range(6)))
    for request in neighbours:
        assert rig.answers[request.id].tokens == model.expected_answer(request)
    assert page not in rig.cache.tree and page not in rig.pool.free_pages()
    stats = rig.scheduler.stats()
    assert (stats.integrity_faults, stats.quarantined_pages) == (1, 1)
    rig.check_idle()


def test_each_request_that_shares_a_bad_page_ends_by_its_own_check() -> None:
    rig = Rig(pages=24, limits=LIMITS)
    shared = list(range(8))
    rig.run(ask("writer", [*shared, 50], 1))
    rig.add(ask("a", [*shared, 51]), ask("b", [*shared, 52]), ask("c", [60, 61]))
    step = rig.schedule()
    page = rows_of(step)["a"][0]
    assert step is not None and rows_of(step)["b"][0] == page
    results = rig.runner.execute(step)
    results[0] = RowResult(fault=PageFault(page, step.rows[0].tags[0], 0))
    rig.commit(step, results)
    assert rig.answers["a"].error_code is ErrorCode.CACHE_INTEGRITY
    assert rig.answers["b"].tokens and rig.answers["b"].finish is None
    assert page not in rig.cache.tree
    rig.runner.overwrite(page)
    rig.step()
    assert rig.answers["b"].error_code is ErrorCode.CACHE_INTEGRITY
    rig.run()
    assert rig.answers["c"].finish is FinishReason.LENGTH
    assert rig.scheduler.stats().quarantined_pages == 1
    rig.check_idle()


def test_logits_that_are_not_finite_end_their_request_and_blame_no_page() -> None:
    model = ScriptedModel()
    rig = Rig(pages=24, limits=LIMITS, model=model)
    neighbour, victim = ask("neighbour", list(range(9))), ask("victim", list(range(100, 109)))
    rig.add(neighbour, victim)
    rig.step()
    step = rig.schedule()
    assert step is not None
    results = rig.runner.execute(step)
    place = [row.request_id for row in step.rows].index("victim")
    results[place] = RowResult(fault=LogitsFault(step.rows[place].end - 1))
    rig.commit(step, results)
    answer = rig.answers["victim"]
    assert (answer.finish, answer.error_code) == (FinishReason.ERROR, ErrorCode.INTERNAL)
    assert answer.error is not None and "logits after position 9 are not all finite" in answer.error
    assert len(answer.tokens) == 1, "no token of the step without logits was sent"
    rig.run()
    assert rig.answers["neighbour"].tokens == model.expected_answer(neighbour)
    stats = rig.scheduler.stats()
    assert (stats.logits_faults, stats.integrity_faults, stats.quarantined_pages) == (1, 0, 0)
    rig.check_idle()


def test_bytes_spoiled_in_the_cache_are_found_on_reuse_and_then_computed_anew() -> None:
    model = ScriptedModel()
    rig = Rig(pages=24, limits=LIMITS, model=model)
    prompt = list(range(14))
    rig.run(ask("writer", prompt, 1))
    step_pages = list(rig.cache.tree.pages())
    rig.runner.corrupt(step_pages[1])
    (answer,) = rig.run(ask("first", prompt))
    assert answer.error_code is ErrorCode.CACHE_INTEGRITY and answer.tokens == []
    assert answer.error is not None and "the bytes that it was sealed with" in answer.error
    assert set(rig.cache.tree.pages()) <= {step_pages[0]}, "what stood upon the page is gone too"
    second = ask("second", prompt)
    (answer,) = rig.run(second)
    assert (answer.tokens, answer.cached_tokens) == (model.expected_answer(second), 4)


def test_a_late_writer_is_noticed_by_everyone_who_shares_and_by_nobody_else() -> None:
    rig = Rig(pages=24, limits=LIMITS)
    shared = list(range(8))
    rig.run(ask("writer", [*shared, 50], 1))
    rig.add(ask("a", [*shared, 51]), ask("b", [*shared, 52]), ask("c", [60, 61]))
    rig.step()
    rig.runner.overwrite(next(iter(rig.cache.tree.pages())))
    rig.run()
    codes = {name: answer.error_code for name, answer in rig.answers.items()}
    integrity = ErrorCode.CACHE_INTEGRITY
    assert codes == {"writer": None, "a": integrity, "b": integrity, "c": None}
    assert rig.scheduler.stats().integrity_faults == 2
    rig.check_idle()


@pytest.mark.parametrize("spoil", ["overwrite", "corrupt"])
def test_without_the_check_the_same_faults_send_wrong_tokens(spoil: str) -> None:
    model = ScriptedModel()
    rig = Rig(pages=24, limits=LIMITS, model=model, integrity=False, audit=False)
    request = ask("victim", list(range(9)))
    rig.add(request)
    rig.step()
    getattr(rig.runner, spoil)(next(iter(rig.cache.tree.pages())))
    rig.run()
    answer = rig.answers["victim"]
    assert answer.finish is FinishReason.LENGTH
    assert answer.tokens != model.expected_answer(request)


def test_the_audit_of_the_scripted_runner_sees_a_page_shared_wrongly() -> None:
    rig = Rig(pages=24, limits=LIMITS, integrity=False)
    rig.add(ask("a", list(range(9))), ask("b", list(range(20, 29))))
    rig.step()
    step = rig.schedule()
    assert step is not None
    step.rows[0].page_ids[0] = step.rows[1].page_ids[0]
    with pytest.raises(WrongContentError, match="foreign content at 0"):
        rig.runner.execute(step)
