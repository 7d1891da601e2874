"""The scheduler's promises to a single request and between tenants."""

from __future__ import annotations

from collections.abc import Iterator
from zlib import crc32

import pytest

from bifolio.cache.manager import CacheManager
from bifolio.cache.page_pool import PagePool
from bifolio.cache.stamps import PageFault
from bifolio.errors import OverloadedError, RequestError
from bifolio.request import ErrorCode, FinishReason, Request, SamplingParams, TokenLogprobs
from bifolio.scheduler.limits import SchedulerLimits
from bifolio.scheduler.scheduler import Scheduler
from bifolio.scheduler.sequence import Sequence
from bifolio.scheduler.step import RowResult, Step
from support.rig import Rig
from support.scripted import ScriptedModel


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def ask(
    name: str, prompt: list[int] | int = 4, max_tokens: int = 4, salt: str = "", **sampling: object
) -> Request:
    """A request; a number as prompt means that many tokens that nobody else has."""
    if isinstance(prompt, int):
        prompt = [crc32(name.encode()) // 2 + i for i in range(prompt)]
    params = SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    return Request(id=name, prompt_ids=prompt, tenant=salt, cache_salt=salt, sampling=params)


def make_scheduler(
    pages: int = 64, clock: Clock | None = None, stop_ids: tuple[int, ...] = (), **limits: float
) -> Scheduler:
    defaults: dict[str, float] = {"max_model_len": 256, "max_num_seqs": 8, "max_step_tokens": 16}
    return Scheduler(
        CacheManager(PagePool(pages), 4, 1, 1),
        SchedulerLimits(**(defaults | limits)),  # type: ignore[arg-type]
        stop_ids,
        clock or Clock(),
    )


def results(step: Step, token: int = 1) -> list[RowResult]:
    return [RowResult(token=token if row.sample else None) for row in step.rows]


def steps(scheduler: Scheduler, token: int = 1) -> Iterator[list[tuple[str, int, int]]]:
    """Step until all is done; yields (request, start, end) of each row."""
    while (step := scheduler.schedule()) is not None:
        yield [(row.request_id, row.start, row.end) for row in step.rows]
        scheduler.commit(step, results(step, token))


# ── one rule ─────────────────────────────────────────────────────────────────────────────────


def test_prefill_chunks_and_decode_are_computed_tokens_catching_up() -> None:
    scheduler = make_scheduler(max_step_tokens=6)
    scheduler.add(ask("a", 14, 3))
    rows = [row for step in steps(scheduler) for row in step]
    assert rows == [("a", 0, 6), ("a", 6, 12), ("a", 12, 14), ("a", 14, 15), ("a", 15, 16)]


def test_decode_goes_first_and_prefill_fills_what_is_left() -> None:
    scheduler = make_scheduler(max_step_tokens=6)
    scheduler.add(ask("a", 4, 9))
    scheduler.add(ask("b", 11, 2))
    assert list(steps(scheduler))[:4] == [
        [("a", 0, 4), ("b", 0, 2)],
        [("a", 4, 5), ("b", 2, 7)],
        [("a", 5, 6), ("b", 7, 11)],
        [("a", 6, 7), ("b", 11, 12)],
    ]


def test_no_step_exceeds_its_tokens_or_rows() -> None:
    scheduler = make_scheduler(max_step_tokens=5, max_num_seqs=3)
    for i in range(9):
        scheduler.add(ask(str(i), 1 + 3 * i, 5))
    for rows in steps(scheduler):
        assert sum(end - start for _, start, end in rows) <= 5
        assert len(rows) <= 3
    assert scheduler.stats().finished == 9


def test_rows_that_want_prompt_logits_share_what_a_step_may_give() -> None:
    scheduler = make_scheduler(max_step_tokens=64, max_step_logits=8)
    for name in "ab":
        scheduler.add(ask(name, 12, 3, prompt_logprobs=1))
    scheduler.add(ask("c", 30, 3))
    wanted = []
    while (step := scheduler.schedule()) is not None:
        prefill = [row for row in step.rows if row.request_id in "ab" and row.start < 12]
        wanted.append(sum(len(row.token_ids) for row in prefill))
        results = []
        for row in step.rows:
            count = max(0, min(row.end, row.prompt_len - 1) - row.logits_from)
            results.append(
                RowResult(
                    token=1 if row.sample else None,
                    prompt_logprobs=[TokenLogprobs(0.0, 1, [])] * count * (row.request_id in "ab"),
                )
            )
        scheduler.commit(step, results)
    assert wanted[:4] == [8, 8, 8, 0]
    assert scheduler.stats().finished == 3


def test_every_running_request_decodes_in_every_step() -> None:
    scheduler = make_scheduler(max_step_tokens=4, max_num_seqs=64)
    for i in range(6):
        scheduler.add(ask(str(i), 1, 8))
    for rows in steps(scheduler):
        assert len(rows) == min(4, scheduler.stats().running)


def test_a_row_says_what_the_runner_needs() -> None:
    scheduler = make_scheduler(max_step_tokens=6)
    request = ask("a", [5, 6, 7, 8, 9, 10, 11, 12], 4)
    scheduler.add(request)
    step = scheduler.schedule()
    assert step is not None
    (row,) = step.rows
    assert (row.start, row.token_ids, row.end) == (0, [5, 6, 7, 8, 9, 10], 6)
    assert (row.sample, row.logits_from) == (False, 6)
    assert row.prompt_len == 8 and row.prompt_ids is request.prompt_ids and row.output_ids == []
    assert row.sampling is request.sampling
    assert [stamp.page for stamp in step.stamps] == row.page_ids
    assert [stamp.tag for stamp in step.stamps] == row.tags
    scheduler.commit(step, results(step))
    step = scheduler.schedule()
    assert step is not None
    (row,) = step.rows
    assert (row.start, row.token_ids) == (6, [11, 12])
    assert (row.sample, row.logits_from) == (True, 7)
    scheduler.commit(step, results(step, token=3))
    step = scheduler.schedule()
    assert step is not None
    (row,) = step.rows
    assert (row.start, row.token_ids, row.output_ids) == (8, [3], [3])
    assert (row.sample, row.logits_from, row.prompt_len) == (True, 8, 8)
    assert len(row.page_ids) == 3 and len(step.stamps) == 1


def test_one_step_is_in_flight_at_a_time() -> None:
    scheduler = make_scheduler()
    scheduler.add(ask("a"))
    step = scheduler.schedule()
    assert step is not None
    with pytest.raises(AssertionError, match="in flight"):
        scheduler.schedule()
    scheduler.commit(step, results(step))
    with pytest.raises(AssertionError, match="only the step in flight"):
        scheduler.commit(step, results(step))


# ── reuse ────────────────────────────────────────────────────────────────────────────────────


def test_a_prompt_found_whole_in_the_cache_still_computes_its_last_token() -> None:
    scheduler = make_scheduler()
    tokens = list(range(1, 9))
    for name, expected in (("cold", 0), ("warm", 4)):
        scheduler.add(ask(name, tokens, 1))
        step = scheduler.schedule()
        assert step is not None
        assert (step.rows[0].start, step.rows[0].reused_pages) == (expected, expected // 4)
        (output,) = scheduler.commit(step, results(step))
        assert output.cached_tokens == expected
    stats = scheduler.stats()
    assert (stats.query_tokens, stats.hit_tokens) == (16, 4)


def test_requests_that_come_together_compute_their_common_prompt_once() -> None:
    for step_tokens in (16, 64, 256):
        model = ScriptedModel()
        limits = SchedulerLimits(max_model_len=64, max_num_seqs=8, max_step_tokens=step_tokens)
        rig = Rig(pages=64, model=model, limits=limits)
        requests = [ask(str(i), list(range(1, 42)), 3, seed=i) for i in range(5)]
        for request, answer in zip(requests, rig.run(*requests), strict=True):
            assert answer.tokens == model.expected_answer(request)
            assert answer.cached_tokens == (0 if request.id == "0" else 40)
        assert rig.scheduler.stats().computed_tokens == 41 + 4 * 1 + 5 * 2


def test_a_little_in_common_is_not_worth_a_step() -> None:
    scheduler = make_scheduler(max_step_tokens=64)
    scheduler.add(ask("a", [*range(1, 8), *range(100, 117)], 1))
    scheduler.add(ask("b", [*range(1, 8), *range(200, 217)], 1))
    assert list(steps(scheduler)) == [[("a", 0, 24), ("b", 0, 24)]]


def test_a_request_computes_the_common_prompt_itself_if_its_twin_gives_up() -> None:
    scheduler = make_scheduler(max_step_tokens=64)
    for name in ("a", "b"):
        scheduler.add(ask(name, list(range(1, 18)), 1))
    step = scheduler.schedule()
    assert step is not None and len(step.rows) == 1
    scheduler.abort("a")
    scheduler.commit(step, results(step))
    assert list(steps(scheduler)) == [[("b", 0, 17)]]


def test_reused_pages_are_announced_in_the_first_step_only() -> None:
    scheduler = make_scheduler(max_step_tokens=4)
    for name in ("cold", "warm"):
        scheduler.add(ask(name, list(range(1, 20)), 2))
        reused = []
        while (step := scheduler.schedule()) is not None:
            reused.append(step.rows[0].reused_pages)
            scheduler.commit(step, results(step))
        assert reused == ([0] * 6 if name == "cold" else [4, 0])


def test_a_second_turn_finds_prompt_and_answer_of_the_first() -> None:
    model = ScriptedModel()
    rig = Rig(model=model)
    first = ask("first", [1, 2, 3, 4, 5, 6], 10)
    (answer,) = rig.run(first)
    second = ask("second", first.prompt_ids + answer.tokens + [9], 4)
    (reply,) = rig.run(second)
    # 16 tokens, of which the last was sampled but never computed.
    assert reply.cached_tokens == 12
    assert reply.tokens == model.expected_answer(second)


def test_prompt_logprobs_are_computed_anew_however_warm_the_cache() -> None:
    model = ScriptedModel()
    rig = Rig(
        model=model, limits=SchedulerLimits(max_model_len=64, max_num_seqs=4, max_step_tokens=5)
    )
    tokens = list(range(1, 14))
    rig.run(ask("cold", tokens, 3))
    for name in ("once", "again"):
        request = ask(name, tokens, 3, prompt_logprobs=2)
        (answer,) = rig.run(request)
        assert answer.prompt_logprobs == model.expected_prompt_logprobs(request)
        assert len(answer.prompt_logprobs) == 13 and answer.prompt_logprobs[0] is None
        assert answer.tokens == model.expected_answer(request)
        assert answer.cached_tokens == 0


@pytest.mark.parametrize("prompt", [13, 17, 18, 22])
def test_prompt_logprobs_survive_a_preemption_in_the_middle_of_the_prompt(prompt: int) -> None:
    model = ScriptedModel()
    limits = SchedulerLimits(max_model_len=32, max_num_seqs=2, max_step_tokens=2)
    rig = Rig(pages=3 + -(-prompt // 4), model=model, limits=limits)
    old = ask("old", 4, 24, ignore_eos=True)
    new = ask("new", prompt, 2, prompt_logprobs=1)
    rig.add(old, new)
    while not rig.scheduler.stats().preemptions:
        assert rig.step(), "the pool was meant to be too small"
    assert not rig.answers["new"].tokens
    rig.run()
    for request in (old, new):
        assert rig.answers[request.id].tokens == model.expected_answer(request)
    assert rig.answers["new"].prompt_logprobs == model.expected_prompt_logprobs(new)


def test_prompt_logprobs_of_a_single_token_are_one_null() -> None:
    (answer,) = Rig().run(ask("a", [3], 2, prompt_logprobs=0))
    assert answer.prompt_logprobs == [None]


# ── refusal ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param", "text"),
    [
        (0, 4, "prompt", "empty"),
        (20, 13, "max_tokens", "context length is 32 tokens.* at most 12 are possible"),
        (32, 1, "prompt", "context length is 32 tokens.* has 32 tokens, and at least one more"),
        (99, 1, "prompt", "context length is 32 tokens.* has 99 tokens"),
        (1, 10**6, "max_tokens", "at most 31 are possible"),
    ],
)
def test_a_request_beyond_the_context_is_refused_by_parameter_limit_and_cure(
    prompt: int, max_tokens: int, param: str, text: str
) -> None:
    scheduler = make_scheduler(max_model_len=32)
    with pytest.raises(RequestError, match=text) as refused:
        scheduler.add(ask("a", prompt, max_tokens))
    assert refused.value.param == param
    assert not scheduler.has_work


def test_a_request_at_the_context_limit_is_served() -> None:
    scheduler = make_scheduler(max_model_len=32, pages=8)
    assert scheduler.max_request_tokens == 32
    scheduler.add(ask("a", 31, 1))
    scheduler.add(ask("b", 1, 31))
    assert list(steps(scheduler))
    assert scheduler.stats().finished == 2


def test_a_request_that_the_pool_can_never_hold_is_refused() -> None:
    scheduler = make_scheduler(max_model_len=256, pages=6)
    assert scheduler.max_request_tokens == 24
    with pytest.raises(RequestError, match=r"length is 24 tokens.* at most 4 are possible"):
        scheduler.add(ask("a", 20, 5))
    scheduler.add(ask("b", 20, 4))
    assert len(list(steps(scheduler))) == 5


def test_ids_in_use_and_prompts_that_are_no_token_ids_are_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add(ask("a"))
    with pytest.raises(RequestError, match="already in use") as refused:
        scheduler.add(ask("a"))
    assert refused.value.param == "request_id"
    for wrong in (-1, 2**32):
        with pytest.raises(RequestError, match="not a list of token ids") as refused:
            scheduler.add(ask("b", [1, wrong]))
        assert refused.value.param == "prompt"
    assert scheduler.stats().waiting == 1


def test_a_full_queue_asks_to_come_back_later() -> None:
    scheduler = make_scheduler(max_waiting=2)
    scheduler.add(ask("a"))
    scheduler.add(ask("b"))
    with pytest.raises(OverloadedError) as refused:
        scheduler.add(ask("c"))
    assert refused.value.retry_after >= 1.0
    assert scheduler.schedule() is not None
    scheduler.add(ask("c"))


def test_the_wait_asked_for_follows_the_pace_at_which_requests_end() -> None:
    clock = Clock()
    scheduler = make_scheduler(clock=clock, max_waiting=1, max_num_seqs=1)
    waits = []
    for i in range(40):
        scheduler.add(ask(f"in{i}", 4, 1))
        with pytest.raises(
            OverloadedError, match="busy: 1 request in line already; send it again later"
        ) as refused:
            scheduler.add(ask("out"))
        waits.append(refused.value.retry_after)
        clock.now += 9.0
        list(steps(scheduler))
    assert waits[0] == 1.0
    assert waits[-1] == pytest.approx(9.0, rel=0.01)


# ── the end ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("sampling", "sampled", "given", "stop_id"),
    [
        ({}, [1, 2, 0, 3], [1, 2, 0], 0),
        ({"stop_token_ids": (2,)}, [1, 2, 0], [1, 2], 2),
        ({"ignore_eos": True}, [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0], None),
        ({"ignore_eos": True, "stop_token_ids": (0,)}, [1, 0], [1, 0], 0),
        ({"stop_token_ids": (2,), "min_tokens": 2}, [2, 0, 2], [2, 0, 2], 2),
        ({"min_tokens": 5}, [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0], None),
        ({}, [1, 2, 3, 4, 0], [1, 2, 3, 4, 0], 0),
        ({}, [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5], None),
    ],
)
def test_a_request_ends_by_stop_token_or_length(
    sampling: dict[str, object], sampled: list[int], given: list[int], stop_id: int | None
) -> None:
    scheduler = make_scheduler(stop_ids=(0,))
    scheduler.add(ask("a", 3, 5, **sampling))
    outputs = []
    for token in sampled:
        step = scheduler.schedule()
        if step is None:
            break
        outputs += scheduler.commit(step, results(step, token))
    assert [token for output in outputs for token in output.tokens] == given
    assert [output.finish for output in outputs[:-1]] == [None] * (len(given) - 1)
    assert outputs[-1].finish is (FinishReason.LENGTH if stop_id is None else FinishReason.STOP)
    assert outputs[-1].stop_id == stop_id
    assert scheduler.stats().live_pages == 0 and not scheduler.has_work


def test_an_aborted_request_is_gone_at_once_whatever_it_was_doing() -> None:
    for prepare in range(4):
        rig = Rig(limits=SchedulerLimits(max_model_len=64, max_num_seqs=2, max_step_tokens=5))
        rig.add(ask("a", 12, 8), ask("b", 7, 8), ask("waits", 4, 8))
        for _ in range(prepare):
            rig.step()
        for name in ("waits", "a", "b"):
            rig.abort(name)
            assert rig.answers[name].finish is FinishReason.ABORT
        assert rig.scheduler.abort("a") is None
        rig.check_idle()
        assert rig.scheduler.stats().aborted == 3


@pytest.mark.parametrize("after", range(5))
def test_an_abort_at_any_chunk_border_leaves_a_sound_pool_and_a_sound_prefix(after: int) -> None:
    model = ScriptedModel()
    limits = SchedulerLimits(max_model_len=80, max_num_seqs=4, max_step_tokens=16)
    rig = Rig(pages=24, model=model, limits=limits)
    prompt = list(range(1, 65))
    rig.add(ask("doomed", prompt, 4))
    for _ in range(after):
        rig.step()
    rig.abort("doomed")
    rig.check_idle()
    fillers = [ask(f"filler {i}", [100 + i] * 40, 4) for i in range(6)]
    rig.run(*fillers)
    again = ask("again", prompt, 4)
    rig.add(again, ask("last", [7] * 9, 4))
    rig.run()
    assert rig.answers["again"].tokens == model.expected_answer(again)
    rig.check_idle()


def test_an_abort_between_schedule_and_commit_drops_the_result() -> None:
    rig = Rig()
    rig.add(ask("a", 6, 4), ask("b", 6, 4))
    step = rig.schedule()
    assert step is not None
    rig.abort("a")
    rig.commit(step, rig.runner.execute(step))
    assert rig.answers["a"].tokens == [] and len(rig.answers["b"].tokens) == 1
    rig.run()
    rig.check_idle()


def test_a_result_of_an_earlier_life_of_the_same_id_is_dropped() -> None:
    scheduler = make_scheduler()
    scheduler.add(ask("a", [1, 2, 3], 4))
    step = scheduler.schedule()
    assert step is not None
    old = step.rows[0].generation
    scheduler.abort("a")
    scheduler.add(ask("a", [4, 5, 6, 7], 4))
    assert scheduler.commit(step, results(step, token=9)) == []
    step = scheduler.schedule()
    assert step is not None
    assert step.rows[0].token_ids == [4, 5, 6, 7] and step.rows[0].output_ids == []
    assert step.rows[0].generation > old


def test_a_row_of_an_earlier_admission_changes_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.add(ask("a", [1, 2, 3], 4))
    step = scheduler.schedule()
    assert step is not None
    step.rows[0].generation -= 1
    assert scheduler.commit(step, results(step, token=9)) == []
    scheduler.check_invariants()
    step = scheduler.schedule()
    assert step is not None
    assert (step.rows[0].start, step.rows[0].output_ids) == (0, [])


def test_a_step_that_the_runner_could_not_execute_ends_its_requests_only() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in ("a", "b", "waits"):
        scheduler.add(ask(name))
    step = scheduler.schedule()
    assert step is not None
    scheduler.abort("b")
    (output,) = scheduler.fail(step, "the kernel gave up")
    assert (output.id, output.finish) == ("a", FinishReason.ERROR)
    assert (output.error, output.error_code) == ("the kernel gave up", ErrorCode.INTERNAL)
    scheduler.check_invariants()
    assert [row[0][0] for row in steps(scheduler)] == ["waits"] * 4


# ── between tenants ──────────────────────────────────────────────────────────────────────────


def admitted(scheduler: Scheduler) -> list[str]:
    """Names in the order of their first rows."""
    order: list[str] = []
    for rows in steps(scheduler):
        order += [name for name, _, _ in rows if name not in order]
    return order


def test_within_a_tenant_the_first_come_is_the_first_served() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    names = [f"r{i}" for i in range(7)]
    for i, name in enumerate(names):
        scheduler.add(ask(name, 1 + i % 3, 3))
    assert admitted(scheduler) == names


def test_a_tenant_with_a_long_queue_does_not_hold_up_another() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for i in range(20):
        scheduler.add(ask(f"many{i}", 4, 4, salt="many"))
    scheduler.add(ask("few0", 4, 4, salt="few"))
    scheduler.add(ask("few1", 4, 4, salt="few"))
    order = admitted(scheduler)
    assert order.index("few0") <= 1 and order.index("few1") <= 3
    assert [name for name in order if name.startswith("many")] == [f"many{i}" for i in range(20)]


def test_tenants_share_by_tokens_and_not_by_requests() -> None:
    scheduler = make_scheduler(max_num_seqs=1, pages=64)
    for i in range(40):
        scheduler.add(ask(f"big{i}", 30, 10, salt="big"))
        scheduler.add(ask(f"small{i}", 3, 1, salt="small"))
    order = admitted(scheduler)
    bigs = [name.startswith("big") for name in order[: order.index("small39")]]
    assert 2 <= sum(bigs) <= 6, "40 small requests weigh as much as 4 big ones"


def test_long_answers_weigh_as_much_as_long_prompts() -> None:
    scheduler = make_scheduler(max_num_seqs=1, pages=64)
    for i in range(40):
        scheduler.add(ask(f"long{i}", 4, 36, salt="long"))
        scheduler.add(ask(f"short{i}", 3, 1, salt="short"))
    order = admitted(scheduler)
    longs = [name.startswith("long") for name in order[: order.index("short39")]]
    assert 2 <= sum(longs) <= 6, "40 short answers weigh as much as 4 long ones"


def test_every_token_is_charged_once_also_to_those_who_are_preempted() -> None:
    scheduler = make_scheduler(max_num_seqs=3, pages=8)
    charged = 0
    enter = scheduler._queue.charge

    def charge(sequence: Sequence, tokens: int) -> None:
        nonlocal charged
        charged += tokens
        enter(sequence, tokens)

    scheduler._queue.charge = charge  # type: ignore[method-assign]
    for i in range(6):
        scheduler.add(ask(f"r{i}", 4, 20))
    list(steps(scheduler))
    stats = scheduler.stats()
    assert stats.preemptions
    assert charged == stats.computed_tokens


def test_a_tenant_saves_up_no_claim_while_nothing_of_it_waits() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_model_len=1000, pages=256)
    scheduler.add(ask("quiet", 4, 200, salt="quiet"))
    for i in range(60):
        scheduler.add(ask(f"busy{i}", 4, 4, salt="busy"))
    order: list[str] = []
    while len(order) < 30:
        step = scheduler.schedule()
        assert step is not None
        order += [o.id for o in scheduler.commit(step, results(step)) if o.finish]
    for i in range(20):
        scheduler.add(ask(f"burst{i}", 4, 4, salt="quiet"))
    order = admitted(scheduler)
    order = order[order.index("burst0") : order.index("burst0") + 20]
    busy = sum(name.startswith("busy") for name in order)
    assert 8 <= busy <= 12, "from now on both have the same right"


def test_an_endless_stream_of_new_tenants_does_not_starve_one_that_waits() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for i in range(3):
        scheduler.add(ask(f"old{i}", 4, 4, salt="old"))
    served: list[str] = []
    for i in range(100):
        scheduler.add(ask(f"new{i}", 4, 4, salt=f"new{i}"))
        while len(served) == i:
            step = scheduler.schedule()
            assert step is not None
            served += [o.id for o in scheduler.commit(step, results(step)) if o.finish]
        if "old2" in served:
            break
    assert "old2" in served


def test_a_tenant_that_has_gone_leaves_nothing_behind() -> None:
    scheduler = make_scheduler()
    for i in range(200):
        scheduler.add(ask(f"r{i}", 2, 1, salt=str(i)))
        if i % 2:
            scheduler.abort(f"r{i}")
    assert scheduler.stats().tenants == 100
    list(steps(scheduler))
    assert scheduler.stats().tenants == 0
    scheduler.check_invariants()


# ── watching ─────────────────────────────────────────────────────────────────────────────────


def test_a_stall_is_reported_while_work_waits_and_only_then() -> None:
    clock = Clock()
    scheduler = make_scheduler(clock=clock, stall_seconds=10.0)
    clock.now = 100.0
    assert scheduler.stalled() is None, "an idle engine does not stall"
    scheduler.add(ask("a", 20, 3))
    clock.now = 109.0
    assert scheduler.stalled() is None
    clock.now = 110.0
    report = scheduler.stalled()
    assert report is not None and "waiting a: 20 tokens" in report
    step = scheduler.schedule()
    assert step is not None
    report = scheduler.stalled()
    assert report is not None and "running a: 0 of 20 tokens computed" in report
    scheduler.commit(step, results(step))
    assert scheduler.stalled() is None
    list(steps(scheduler))
    clock.now = 1000.0
    assert scheduler.stalled() is None


def test_steps_that_compute_nothing_are_no_progress() -> None:
    clock = Clock()
    scheduler = make_scheduler(clock=clock, stall_seconds=10.0, max_num_seqs=1)
    for i in range(8):
        scheduler.add(ask(str(i)))
    for _ in range(4):
        step = scheduler.schedule()
        assert step is not None and scheduler.stalled() is None
        clock.now += 3.0
        (row,) = step.rows
        fault = PageFault(row.page_ids[0], row.tags[0], 0)
        scheduler.commit(step, [RowResult(fault=fault)])
    assert scheduler.stalled() is not None


def test_stats_count_what_happened() -> None:
    scheduler = make_scheduler()
    scheduler.add(ask("a", 6, 3))
    list(steps(scheduler))
    stats = scheduler.stats()
    assert (stats.steps, stats.computed_tokens, stats.generated_tokens) == (3, 8, 3)
    assert (stats.running, stats.waiting, stats.finished) == (0, 0, 1)
    assert (stats.pages, stats.cached_pages, stats.free_pages) == (64, 2, 62)
