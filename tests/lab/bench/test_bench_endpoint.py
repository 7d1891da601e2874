"""A benchmark of a server says the truth about it, or refuses: against a mock on a real socket."""

import pytest

from bifolio.errors import ConfigError
from bifolio.lab.bench.bench_progress import RunProgress
from bifolio.lab.bench.dialect import EndpointType
from bifolio.lab.bench.endpoint import Endpoint
from bifolio.lab.bench.figures import Goals
from bifolio.lab.bench.lengths import Lengths
from bifolio.lab.bench.load_session import LoadPoint, Plan, measure, series
from bifolio.lab.bench.traffic import Synthetic
from support.mock_server import Mock, serving

TOKENS = 24


def plan(**changes):
    fields = {"prompt": 32, "output": TOKENS, "requests": 10, "seed": 1, "prefix": 0, "turns": 1}
    fields |= {"goals": Goals()} | changes
    work = Synthetic(
        Lengths.parse(fields["prompt"]),
        Lengths.parse(fields["output"]),
        prefix=fields["prefix"],
        turns=fields["turns"],
    )
    return Plan(work, fields["goals"], fields["seed"], fields["requests"])


def run(mock, load=LoadPoint(3), kind=EndpointType.COMPLETIONS, **changes):  # noqa: B008
    with serving(mock) as url:
        target = Endpoint(url, timeout=60, kind=kind)
        try:
            return measure(target, plan(**changes), load, 0)
        finally:
            target.close()


def warned(figures, text):
    return any(text in line for line in figures.warnings)


@pytest.mark.parametrize("usage", ["continuous", "final"])
@pytest.mark.parametrize("silent", [False, True])
def test_tokens_are_the_servers_whatever_its_chunks_hold(usage, silent):
    figures = run(Mock(chunks=(1, 3, 0, 7), usage=usage, silent=silent)).figures
    assert figures.real_output == figures.asked_output == 10 * TOKENS
    assert figures.real_prompt == figures.asked_prompt == 10 * 32
    assert figures.output_rate == pytest.approx(10 * TOKENS / figures.seconds)
    assert not figures.invalid


def test_the_wait_for_a_chunk_is_shared_among_its_tokens():
    delay = 0.01
    made = run(Mock(chunks=(1, 3, 0, 7), chunk_delay=delay, stepwise=True), requests=3)
    for record in made.seen.records:
        assert sum(record.counts) == TOKENS
        assert len(record.itl) == TOKENS - 1  # the first chunk has one token
        assert sum(record.itl) == pytest.approx(record.last - record.first)
        three, seven = record.itl[:3], record.itl[3:10]
        assert len(set(three)) == len(set(seven)) == 1
        assert sum(three) > 0.99 * delay
        assert sum(seven) > 0.99 * 2 * delay  # the chunk before had none
    itl = made.figures.itl
    assert itl.count == 3 * (TOKENS - 1)
    assert 0 < itl.low < itl.high


def test_tokens_that_come_with_the_first_take_no_time_of_their_own():
    record = run(Mock(chunks=(12,), stepwise=True), requests=1).seen.records[0]
    assert record.tpot == pytest.approx((record.last - record.first) / 12)


def test_without_counts_of_chunks_there_is_no_itl_and_it_is_said():
    figures = run(Mock(chunks=(1, 3, 0, 7), usage="final", stepwise=True)).figures
    assert figures.itl is None
    assert figures.peak_rate is None
    assert figures.tpot is not None
    assert warned(figures, "how many tokens a chunk has")


def test_a_server_without_usage_is_refused():
    with serving(Mock(usage=None)) as url, pytest.raises(ConfigError, match="cannot be counted"):
        Endpoint(url)


def test_a_server_that_knows_no_extras_is_asked_without_them():
    mock = Mock(strict=True, usage="final")
    figures = run(mock).figures
    assert figures.real_output == 10 * TOKENS
    assert "ignore_eos" not in mock.bodies[-1]


def test_the_usage_counts_where_chunks_contradict_it():
    figures = run(Mock(chunks=(2,), lie=5), goals=Goals(length_error=0.5)).figures
    assert figures.real_output == 10 * (TOKENS + 5)
    assert figures.itl is None
    assert warned(figures, "do not add up")


@pytest.mark.parametrize("kind", EndpointType)
@pytest.mark.parametrize(
    ("more", "finish", "cause"),
    [
        ((-9,), "stop", "does not honour ignore_eos"),
        ((-TOKENS + 3,), "stop", "does not honour ignore_eos"),
        ((-9,), "length", "limits answers or ran out of context"),
        ((40,), "length", "does not keep to max_tokens"),
        ((-6, 6), "stop", "does not honour ignore_eos"),  # as many tokens as asked for, all in all
    ],
)
def test_other_lengths_than_asked_make_a_run_invalid_and_name_the_cause(more, finish, cause, kind):
    figures = run(Mock(more=more, finish=finish), kind=kind).figures
    came = 10 * TOKENS + sum(more) * 10 // len(more)
    assert (figures.asked_output, figures.real_output) == (10 * TOKENS, came)
    assert figures.output_rate == pytest.approx(came / figures.seconds)
    assert figures.invalid[0].startswith(
        f"asked for {10 * TOKENS} output tokens, got {came} (10 of 10 requests differ), more than "
        "2% off: "
    )
    assert cause in figures.invalid[0]
    assert "hint: " in figures.invalid[0]
    assert figures.cost(1.0) is None


@pytest.mark.parametrize(("more", "valid"), [(-2, True), (-3, False), (2, True), (3, False)])
def test_answers_may_miss_their_length_by_two_percent(more, valid):
    figures = run(Mock(more=(more,), finish="stop"), output=100).figures
    assert (not figures.invalid) == valid
    assert (figures.cost(1.0) is not None) == valid
    assert warned(figures, f"asked for 1,000 output tokens, got {1000 + 10 * more:,}")


def test_a_run_with_a_wider_bound_counts_what_came():
    figures = run(Mock(more=(-9,)), goals=Goals(length_error=0.5)).figures
    assert not figures.invalid
    assert figures.cost(3600.0) == pytest.approx(1e6 / figures.output_rate)
    assert warned(figures, "rates count what came")


@pytest.mark.parametrize("kind", EndpointType)
def test_a_prompt_that_the_endpoint_cuts_makes_the_run_invalid(kind):
    cut = 20 if kind is EndpointType.CHAT else 1  # a template of 7 tokens may hide some words
    figures = run(Mock(cut=cut), kind=kind).figures
    template = 7 if kind is EndpointType.CHAT else 0
    assert figures.real_prompt == 10 * (32 + template - cut)
    assert "it cuts prompts or does not count them" in figures.invalid[0]
    assert (
        f"sent 320 prompt tokens, of which the endpoint counted {10 * (cut - template)} less"
        in (figures.invalid[0])
    )


def test_a_conversation_in_words_may_be_shorter_than_its_tokens():
    """The text of an answer is not always as many tokens again: only the user's words must be."""
    figures = chat(Mock(silent=True), LoadPoint(1), turns=3, requests=2).figures
    assert figures.real_prompt < figures.asked_prompt
    assert not figures.invalid


def test_a_prompt_with_more_tokens_than_words_is_no_fault_and_is_said():
    figures = chat(Mock(cut=-64)).figures
    assert not figures.invalid
    assert warned(figures, "asked for 320 prompt tokens, got 1,030")


def test_requests_that_fail_count_apart_and_too_many_make_the_run_invalid():
    figures = run(Mock(fail_every=5), requests=40).figures
    assert figures.failed == {"refused": 8}
    assert figures.succeeded == 32
    assert figures.real_output == 32 * TOKENS
    assert "8 of 40 requests failed" in figures.invalid[0]
    assert "I do not like this one" in figures.invalid[0]
    assert figures.latency.count == figures.ttft.count == 32


def test_failures_within_the_limit_leave_the_run_valid():
    figures = run(Mock(fail_every=5), requests=40, goals=Goals(failed=0.25)).figures
    assert figures.failed == {"refused": 8}
    assert not figures.invalid


@pytest.mark.parametrize("politely", [False, True])
def test_an_answer_cut_off_is_no_answer(politely):
    figures = run(Mock(hang_up_every=4, politely=politely), requests=16).figures
    assert figures.failed == {"broken": 4}
    assert figures.real_output == 12 * TOKENS
    assert figures.invalid


@pytest.mark.parametrize("by_usage", [False, True])
def test_a_warm_cache_makes_the_run_invalid(by_usage):
    figures = run(Mock(hit_share=0.5, usage_hits=by_usage, metrics=not by_usage)).figures
    assert figures.hit_rate == pytest.approx(0.5, abs=0.01)
    assert "50% of the prompt tokens came from the prefix cache" in figures.invalid[0]
    if not by_usage:
        assert figures.hit_rate_before == figures.hit_rate_after == pytest.approx(0.5)


def test_hits_are_expected_where_the_workload_shares():
    figures = run(Mock(hit_share=0.5), prefix=32).figures
    assert figures.hit_rate == pytest.approx(0.5)
    assert not figures.invalid


def test_a_server_without_metrics_and_cached_tokens_could_hide_a_warm_cache():
    assert warned(run(Mock(metrics=False)).figures, "a warm cache would not show")


def test_no_prompt_comes_twice_in_a_series_nor_in_the_warm_up():
    mock = Mock()
    with serving(mock) as url:
        target = Endpoint(url)
        list(series(target, plan(requests=4), [LoadPoint(1), LoadPoint(2)], 3, RunProgress()))
        target.close()
    prompts = [tuple(body["prompt"]) for body in mock.bodies]
    assert len(set(prompts)) == len(prompts) == 1 + 2 * 3 * 4


def test_a_slow_first_token_is_in_the_ttft_and_not_in_the_tpot():
    made = run(Mock(first_delay=0.2, stepwise=True), requests=2)
    assert made.figures.ttft.low > 0.99 * 0.2
    for record in made.seen.records:
        assert record.tpot == pytest.approx((record.last - record.first) / (TOKENS - 1))
        assert record.first - record.start == record.ttft


def test_the_goals_decide_what_is_good():
    for ttft, good in ((0.1, 0), (50.0, 2)):
        made = run(Mock(first_delay=0.2), requests=2, goals=Goals(ttft=ttft))
        assert made.figures.good == good


def test_a_closed_loop_holds_its_concurrency_and_keeps_its_connections():
    mock = Mock(together=4)
    made = run(mock, LoadPoint(4), requests=12)
    starts, ends = ([getattr(r, name) for r in made.seen.records] for name in ("start", "end"))
    assert max(sum(s <= at < e for s, e in zip(starts, ends, strict=True)) for at in starts) == 4
    assert mock.most_open == 4
    assert mock.connections <= 6  # 4, and one each for the looks at the metrics and the probe


def test_an_open_loop_does_not_wait_for_a_slow_server():
    mock = Mock(together=20)
    assert not run(mock, LoadPoint(rate=100.0), requests=20).figures.failed
    assert mock.most_open == 20


def test_later_turns_send_the_earlier_ones_again():
    mock = Mock()
    run(mock, LoadPoint(1), turns=3, requests=1)
    _, one, two, three = (body["prompt"] for body in mock.bodies)
    assert two[: len(one)] == one
    assert three[: len(two)] == two
    assert [len(one), len(two), len(three)] == [32, 64 + TOKENS, 96 + 2 * TOKENS]


def test_a_turn_that_fails_ends_its_session():
    made = run(Mock(fail_every=2), LoadPoint(1), turns=3, requests=4)
    assert made.figures.unsent > 0
    assert warned(made.figures, "later turns were not sent")


def test_what_the_server_tells_is_in_the_description():
    with serving(Mock()) as url:
        target = Endpoint(url)
        told = target.describe()
        target.close()
    assert (told.model, told.max_model_len, told.cache_tokens) == ("mock", 4096, 1600)


def test_a_server_that_closes_after_each_answer_is_no_failure():
    figures = run(Mock(keep_alive=False), requests=8).figures
    assert not figures.failed


def test_nobody_there_is_an_error_with_the_address():
    with pytest.raises(ConfigError, match=r"no server answers at http://127.0.0.1:9"):
        Endpoint("http://127.0.0.1:9")


def chat(mock, load=LoadPoint(2), **changes):  # noqa: B008
    return run(mock, load, kind=EndpointType.CHAT, **changes)


@pytest.mark.parametrize("usage", ["continuous", "final"])
def test_a_chat_endpoint_gets_a_word_for_each_token_and_its_usage_counts(usage):
    mock = Mock(chunks=(1, 3, 0, 7), usage=usage)
    figures = chat(mock).figures
    assert figures.real_output == figures.asked_output == 10 * TOKENS
    assert (figures.asked_prompt, figures.real_prompt) == (10 * 32, 10 * (32 + mock.template))
    assert (figures.itl is not None) == (usage == "continuous")
    assert not figures.invalid
    texts = [body["messages"][0]["content"] for body in mock.bodies]
    assert len(set(texts)) == len(texts)
    assert not any("prompt" in body for body in mock.bodies)


def test_the_chunk_of_the_role_is_not_the_first_token():
    record = chat(Mock(chunk_delay=0.005), requests=1).seen.records[0]
    assert sum(record.counts) == TOKENS
    assert len(record.arrivals) == TOKENS
    assert record.first == record.arrivals[0]


def test_what_a_chat_template_adds_may_be_cached_and_no_more():
    share = 7 / 39
    figures = chat(Mock(hit_share=share, usage_hits=True)).figures
    assert figures.hit_rate == pytest.approx(share, abs=0.03)
    assert not figures.invalid
    assert "prefix cache" in chat(Mock(hit_share=share + 0.1, usage_hits=True)).figures.invalid[0]


def test_a_template_that_could_not_be_measured_is_not_made_up():
    with (
        serving(Mock(fail_every=1)) as url,
        pytest.raises(ConfigError, match=r"template adds is not known: .*I do not like this one"),
    ):
        Endpoint(url, kind=EndpointType.CHAT)


def test_a_conversation_carries_the_answers_that_came():
    mock = Mock(chunks=(4,))
    chat(mock, LoadPoint(1), turns=3, requests=1)
    last = mock.bodies[-1]["messages"]
    assert [message["role"] for message in last] == ["user", "assistant"] * 2 + ["user"]
    assert last[1]["content"] == "wor" * TOKENS
    assert [len(message["content"].split()) for message in last[::2]] == [32, 32, 32]


def test_a_chat_endpoint_that_knows_new_names_alone_is_asked_with_them():
    mock = Mock(strict=True, new_names=True, usage="final")
    assert chat(mock).figures.real_output == 10 * TOKENS
    assert "max_tokens" not in mock.bodies[-1]


def test_a_server_that_still_loads_says_so():
    with serving(Mock(loading=True)) as url, pytest.raises(ConfigError, match="Loading model"):
        Endpoint(url)


def test_hits_that_every_usage_tells_need_no_metrics():
    figures = run(Mock(hit_share=0.0, usage_hits=True, metrics=False)).figures
    assert figures.hit_rate == 0.0
    assert not warned(figures, "a warm cache would not show")
