"""LLM in one process: batches in order, streams, errors, interrupts, threads."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from bifolio import (
    LLM,
    ConfigError,
    EngineDeadError,
    GenerationError,
    PrecisionPlan,
    RequestError,
    SamplingParams,
)
from bifolio.checkpoint.source import ModelSource
from bifolio.engine import engine as engine_module
from support.faults import VICTIM_SEED, CacheFault, tamper_with
from support.tiny import IM_END
from support.tiny_llm import OPTIONS, RECOMMENDED

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = ["the river", "a", "the capital of the country is in the north " * 3, "sea"]


@pytest.fixture
def idle(llm: LLM) -> Iterator[LLM]:
    """The LLM, which must hold nothing afterwards."""
    yield llm
    assert (llm.stats.running, llm.stats.waiting, llm.stats.live_pages) == (0, 0, 0)


def test_results_are_in_the_order_of_the_prompts_with_the_ids_of_both(idle: LLM) -> None:
    ids = idle.tokenizer.encode(PROMPTS[2])
    outputs = idle.generate([*PROMPTS, ids], GREEDY)
    assert [output.prompt for output in outputs] == [*PROMPTS, None]
    for output in outputs:
        (answer,) = output.outputs
        assert len(answer.token_ids) == 6
        assert (answer.index, answer.finish_reason, answer.error) == (0, "length", None)
        assert idle.tokenizer.decode(answer.token_ids).startswith(answer.text)
        assert len(answer.text) > 1
        assert output.text == answer.text
        assert output.pages_checked > 0
    assert outputs[2].prompt_token_ids == outputs[4].prompt_token_ids == tuple(ids)
    assert outputs[2].outputs == outputs[4].outputs
    assert len({output.request_id for output in outputs}) == len(outputs)
    assert idle.generate([]) == []


def test_one_prompt_may_stand_alone_as_text_or_as_ids(idle: LLM) -> None:
    by_text, by_ids = (
        idle.generate("sea", GREEDY),
        idle.generate(idle.tokenizer.encode("sea"), GREEDY),
    )
    assert [output.outputs for output in by_text] == [output.outputs for output in by_ids]
    assert len(by_text) == 1


def test_results_cannot_be_changed(idle: LLM) -> None:
    (output,) = idle.generate("sea", GREEDY)
    with pytest.raises(FrozenInstanceError):
        output.prompt = "x"
    with pytest.raises(FrozenInstanceError):
        output.outputs[0].text = "x"
    with pytest.raises(AttributeError):
        next(idle.stream("sea", GREEDY)).text = "x"


def test_what_comes_from_the_prefix_cache_is_counted(idle: LLM) -> None:
    prompt = "the river runs to the sea in the north of it " * 3
    cold, warm = (idle.generate(prompt, GREEDY)[0] for _ in range(2))
    assert cold.cached_tokens == 0
    assert warm.cached_tokens >= 16
    assert cold.outputs == warm.outputs


def test_parameters_for_each_prompt_and_changes_that_win_over_them(idle: LLM) -> None:
    params = [SamplingParams(max_tokens=k, ignore_eos=True, temperature=0) for k in (1, 2, 3, 4)]
    lengths = [len(o.outputs[0].token_ids) for o in idle.generate(PROMPTS, params)]
    assert lengths == [1, 2, 3, 4]
    outputs = idle.generate(PROMPTS, params, max_tokens=5)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [5] * 4


def test_prompts_without_parameters_are_sampled_as_the_model_recommends(
    idle: LLM, folder: Path
) -> None:
    found = idle.default_sampling
    assert {name: getattr(found, name) for name in RECOMMENDED} == RECOMMENDED
    recommended = SamplingParams(**RECOMMENDED, seed=5, max_tokens=12, ignore_eos=True)
    (explicit,) = idle.generate("the", recommended)
    (implied,) = idle.generate("the", seed=5, max_tokens=12, ignore_eos=True)
    (neutral,) = idle.generate("the", SamplingParams(seed=5, max_tokens=12, ignore_eos=True))
    assert explicit.outputs == implied.outputs != neutral.outputs
    with LLM(str(folder), generation_config="none", **OPTIONS) as llm:
        assert llm.default_sampling == SamplingParams()


def test_without_a_seed_each_prompt_has_its_own_and_minus_one_asks_for_that(idle: LLM) -> None:
    for params in (SamplingParams(), SamplingParams(seed=-1)):
        outputs = idle.generate(["the"] * 8, params, max_tokens=8, ignore_eos=True)
        assert len({output.outputs[0].token_ids for output in outputs}) == 8
    outputs = idle.generate(["the"] * 3, seed=3, max_tokens=8, ignore_eos=True)
    assert len({output.outputs[0].token_ids for output in outputs}) == 1


def test_n_answers_to_a_prompt_have_seeds_of_their_own(idle: LLM) -> None:
    params = SamplingParams(n=3, seed=3, max_tokens=8, ignore_eos=True)
    (output,) = idle.generate("the", params)
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert len({answer.token_ids for answer in output.outputs}) == 3
    (first,) = idle.generate("the", params, n=1)
    assert first.outputs[0] == output.outputs[0]


def test_a_stop_string_ends_an_answer_before_it(idle: LLM) -> None:
    whole = idle.generate("the", GREEDY, max_tokens=30)[0].text
    stop = whole[10:12]
    cut = whole[: whole.index(stop)]
    for stops in (stop, (stop, "no such text"), [stop]):
        (output,) = idle.generate("the", GREEDY, max_tokens=30, stop=stops)
        (answer,) = output.outputs
        assert (answer.text, answer.finish_reason, answer.stop_reason) == (cut, "stop", stop)
    (output,) = idle.generate(
        "the", GREEDY, max_tokens=30, stop=stop, include_stop_str_in_output=True
    )
    assert output.text == cut + stop


def test_stop_tokens_end_tokens_and_special_tokens(idle: LLM) -> None:
    ids = idle.generate("the", GREEDY)[0].outputs[0].token_ids
    (answer,) = idle.generate("the", GREEDY, stop_token_ids=[ids[2]])[0].outputs
    end = ids.index(ids[2]) + 1
    assert (answer.token_ids, answer.stop_reason) == (ids[:end], ids[2])
    assert answer.text == idle.tokenizer.decode(ids[: end - 1])
    bias = {"logit_bias": {IM_END: 100}}
    (answer,) = idle.generate("the", temperature=0, **bias)[0].outputs
    assert (answer.token_ids, answer.text, answer.finish_reason) == ((IM_END,), "", "stop")
    assert answer.stop_reason is None
    (answer,) = idle.generate("the", GREEDY, **bias)[0].outputs
    assert (answer.token_ids, answer.text) == ((IM_END,) * 6, "")
    (answer,) = idle.generate("the", GREEDY, skip_special_tokens=False, **bias)[0].outputs
    assert answer.text == "<|im_end|>" * 6
    (answer,) = idle.generate("the", temperature=0, min_tokens=2, **bias)[0].outputs
    assert len(answer.token_ids) == 3


def test_log_probabilities_of_answer_and_prompt(idle: LLM) -> None:
    (output,) = idle.generate("the river", GREEDY, logprobs=2, prompt_logprobs=1)
    (answer,) = output.outputs
    assert answer.logprobs is not None
    assert output.prompt_logprobs is not None
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert entry.rank == 1
        assert entry.top[0] == (token, entry.logprob)
        assert len(entry.top) == 2
    first, *others = output.prompt_logprobs
    assert first is None
    assert len(others) == len(output.prompt_token_ids) - 1
    assert all(entry is not None and entry.logprob < 0 for entry in others)
    (output,) = idle.generate("the river", GREEDY)
    assert output.outputs[0].logprobs is output.prompt_logprobs is None


def test_an_answer_ends_where_the_context_does(idle: LLM) -> None:
    (output,) = idle.generate("the", GREEDY, max_tokens=10_000)
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 256
    assert idle.max_model_len == 256


def test_chat_answers_one_conversation_or_many(idle: LLM) -> None:
    one = [{"role": "user", "content": "the sea"}]
    two = [*one, {"role": "assistant", "content": "a"}, {"role": "user", "content": "<|im_end|>"}]
    outputs = idle.chat([one, two], GREEDY)
    assert outputs[0].prompt == "<|im_start|>user\nthe sea<|im_end|>\n<|im_start|>assistant\n"
    assert outputs[1].prompt_token_ids.count(IM_END) == 3, "a user cannot write a special token"
    assert idle.chat(one, GREEDY)[0].outputs == outputs[0].outputs
    (open_end,) = idle.chat(one, ignore_eos=True)
    assert len(open_end.prompt_token_ids) + len(open_end.outputs[0].token_ids) == 256
    (continued,) = idle.chat(two[:2], GREEDY, continue_final_message=True)
    assert continued.prompt is not None
    assert continued.prompt.endswith("assistant\na")
    (bare,) = idle.chat(one, GREEDY, add_generation_prompt=False)
    assert bare.prompt == "<|im_start|>user\nthe sea<|im_end|>\n"


def test_pieces_of_a_stream_joined_are_the_answer(idle: LLM) -> None:
    params = SamplingParams(
        temperature=0.9, seed=4, max_tokens=12, n=2, logprobs=1, prompt_logprobs=0
    )
    (whole,) = idle.generate("the river", params)
    pieces = list(idle.stream("the river", params))
    for answer in whole.outputs:
        parts = [piece for piece in pieces if piece.index == answer.index]
        assert len(parts) > 5
        assert "".join(part.text for part in parts) == answer.text
        assert tuple(token for part in parts for token in part.token_ids) == answer.token_ids
        assert tuple(e for part in parts for e in part.logprobs or ()) == answer.logprobs
        assert parts[-1].finish_reason == answer.finish_reason
        assert {part.finish_reason for part in parts[:-1]} == {None}
        assert tuple(e for p in parts for e in p.prompt_logprobs or ()) == whole.prompt_logprobs
    conversation = [{"role": "user", "content": "the sea"}]
    streamed = "".join(piece.text for piece in idle.stream(conversation, GREEDY))
    assert streamed == idle.chat(conversation, GREEDY)[0].text


def test_streams_run_beside_each_other_and_beside_a_batch(idle: LLM) -> None:
    expected = [output.outputs[0].token_ids for output in idle.generate(PROMPTS, GREEDY)]
    steps = idle.stats.steps
    streams = [idle.stream(prompt, GREEDY) for prompt in PROMPTS]
    rounds = list(zip(*streams, strict=True))
    for column, token_ids in zip(zip(*rounds, strict=True), expected, strict=True):
        assert tuple(token for piece in column for token in piece.token_ids) == token_ids
    assert idle.stats.steps - steps < 2 * 6, "the streams share steps"
    first = idle.stream(PROMPTS[0], GREEDY)
    begun = list(next(first).token_ids)
    batch = idle.generate(PROMPTS, GREEDY)
    assert [output.outputs[0].token_ids for output in batch] == expected
    rest = [token for piece in first for token in piece.token_ids]
    assert tuple(begun + rest) == expected[0]


def test_a_stream_that_is_left_ends_its_request(idle: LLM) -> None:
    for piece in idle.stream("the river", GREEDY, max_tokens=100):
        assert piece.token_ids
        break
    stream = idle.stream("the river", GREEDY, max_tokens=100)
    next(stream)
    assert idle.stats.running == 1
    del stream
    assert idle.stats.running == 0


def test_a_batch_may_be_far_larger_than_the_line_of_the_engine(folder: Path) -> None:
    with LLM(str(folder), **OPTIONS, max_num_seqs=2, max_waiting=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, n=3, ignore_eos=True)
        outputs = llm.generate([f"the {i}" for i in range(15)], params)
        assert [output.prompt for output in outputs] == [f"the {i}" for i in range(15)]
        assert all(len(a.token_ids) == 3 for output in outputs for a in output.outputs)


def test_threads_share_the_engine(idle: LLM) -> None:
    expected = [output.outputs for output in idle.generate(PROMPTS, GREEDY, max_tokens=20)]
    results: dict[int, list[object]] = {}

    def work(number: int) -> None:
        outputs = idle.generate(PROMPTS, GREEDY, max_tokens=20)
        results[number] = [output.outputs for output in outputs]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == dict.fromkeys(range(4), expected)


INVALID: list[tuple[Callable[[LLM], object], str, str]] = [
    (lambda llm: llm.generate("a", max_tokns=1), "max_tokns", "hint: did you mean max_tokens"),
    (lambda llm: llm.generate("a", temperature="hot"), "temperature", "Expected `float`"),
    (lambda llm: llm.generate("a", temperature=-1), "temperature", "at least 0"),
    (lambda llm: llm.generate("a", max_tokens=0), "max_tokens", "at least 1"),
    (lambda llm: llm.generate("a", n=0), "n", "at least 1"),
    (lambda llm: llm.generate("a", top_k=-2), "top_k", "at least 0"),
    (lambda llm: llm.generate("a", stop=[1]), "stop", "Expected `str`"),
    (lambda llm: llm.generate("a", stop_token_ids=(10**6,)), "stop_token_ids", "token id"),
    (lambda llm: llm.generate("a", {"n": 1}), "params", "hint: from bifolio import"),
    (lambda llm: llm.generate(PROMPTS, [GREEDY]), "params", "1 sampling parameters for 4"),
    (lambda llm: llm.generate(""), "prompt", "no tokens"),
    (lambda llm: llm.generate(["a", ""]), "prompt", r"prompts\[1\]"),
    (lambda llm: llm.generate([[1], [-1]]), "prompt", r"prompts\[1\].*-1 is no token id"),
    (lambda llm: llm.generate([[1.5]]), "prompt", "1.5 is no token id"),
    (lambda llm: llm.generate(5), "prompt", "5 is neither"),
    (lambda llm: llm.generate({"prompt": "a"}), "prompt", "neither a text nor"),
    (lambda llm: llm.generate(b"ab"), "prompt", "neither a text nor"),
    (lambda llm: llm.generate("the " * 400), "prompt", "maximum context length is 256"),
    (lambda llm: llm.chat([]), "messages", "at least one message"),
    (lambda llm: llm.chat("hello"), "messages", "hint: .*'role': 'user'"),
    (lambda llm: llm.chat([{"role": "king", "content": "a"}]), "messages[0].role", "king"),
    (lambda llm: llm.stream(PROMPTS, GREEDY), "prompt", "hint: open a stream for each"),
]


@pytest.mark.parametrize(("call", "param", "message"), INVALID)
def test_invalid_input_is_refused_before_anything_is_computed(
    idle: LLM, call: Callable[[LLM], object], param: str, message: str
) -> None:
    steps = idle.stats.steps
    with pytest.raises(RequestError, match=message) as refused:
        call(idle)
    assert refused.value.param == param
    assert idle.stats.steps == steps


def test_options_are_those_of_serve(folder: Path) -> None:
    plan = PrecisionPlan.parse("int8/fp8:token")
    with LLM(str(folder), plan, threads=1, cache_memory="1MiB", max_model_len=64) as llm:
        assert llm.plan == "int8/fp8:token page=16"
        assert llm.max_model_len == 64
    with LLM(str(folder), prefill="int8/bf16", decode="int4:g32/bf16", threads=1) as llm:
        assert llm.plan == "int8/bf16 → int4:g32/bf16 page=16"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"thread": 3}, "'thread'.*did you mean 'threads'"),
        ({"pools": "1p1d"}, "unknown configuration key 'pools'; known keys: cache_memory"),
        ({"port": 8000}, "'port'"),
        ({"plan": "int9"}, "did you mean int8"),
        ({"plan": 5}, "plan: 5 is not a text"),
        ({"threads": "many"}, "threads: .*got 'many'"),
        ({"cache_memory": "1kB"}, "holds no page"),
        ({"chat_template": "{% if %}"}, "chat template"),
        ({"model": "no-such-model"}, "there is no model 'no-such-model'"),
    ],
)
def test_options_that_cannot_work_are_refused(
    folder: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**({"model": str(folder)} | options))


def test_a_failing_request_leaves_the_others_of_its_batch_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, idle: LLM
) -> None:
    real = engine_module.Engine
    tamper = tamper_with(CacheFault.SWAPPED)
    monkeypatch.setattr(
        engine_module, "Engine", lambda config, report: real(config, report, tamper=tamper)
    )
    params = [GREEDY, SamplingParams(seed=VICTIM_SEED, max_tokens=6, ignore_eos=True), GREEDY]
    prompts = [PROMPTS[0], "the victim", PROMPTS[2]]
    with LLM(str(folder), **OPTIONS) as llm:
        good, bad, also_good = llm.generate(prompts, params)
        (answer,) = bad.outputs
        assert answer.finish_reason == "error"
        assert isinstance(answer.error, GenerationError)
        assert answer.error.code == "cache_integrity"
        assert len(answer.token_ids) == 2, "what was proven stays"
        expected = [output.outputs for output in idle.generate([PROMPTS[0], PROMPTS[2]], GREEDY)]
        assert [good.outputs, also_good.outputs] == expected
        stream = llm.stream("the victim", params[1])
        assert next(stream).token_ids == list(answer.token_ids[:1])
        with pytest.raises(GenerationError, match="tag") as failed:
            list(stream)
        assert failed.value.code == "cache_integrity"
        assert llm.stats.integrity_faults == 2


def test_an_interrupt_ends_the_call_between_two_steps_and_the_object_goes_on(
    idle: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [output.outputs for output in idle.generate(PROMPTS, GREEDY, max_tokens=20)]
    engine = idle._engine
    assert engine is not None
    real, begun, ended = engine.step, 0, 0

    def interrupted_step() -> object:
        nonlocal begun, ended
        begun += 1
        if begun == 5:
            signal.raise_signal(signal.SIGINT)
        outputs = real()
        ended += 1
        return outputs

    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", interrupted_step)
        with pytest.raises(KeyboardInterrupt):
            idle.generate(PROMPTS, GREEDY, max_tokens=20)
    assert begun == ended == 5, "the step was computed to its end, and no other begun"
    assert signal.signal(signal.SIGINT, usual) is signal.default_int_handler
    assert (idle.stats.running, idle.stats.waiting) == (0, 0)
    assert [o.outputs for o in idle.generate(PROMPTS, GREEDY, max_tokens=20)] == expected


def test_a_closed_object_says_so(folder: Path) -> None:
    with LLM(str(folder), **OPTIONS) as llm:
        stream = llm.stream("the", GREEDY)
        next(stream)
    for use in (lambda: llm.generate("a"), lambda: next(stream), lambda: llm.stats):
        with pytest.raises(EngineDeadError, match="closed; hint: create another"):
            use()
    llm.close()


def test_nothing_is_drawn_where_standard_error_is_no_terminal(
    idle: LLM, capfd: pytest.CaptureFixture[str]
) -> None:
    idle.generate(PROMPTS, GREEDY, progress=True)
    assert capfd.readouterr() == ("", "")


def test_a_bar_is_drawn_on_a_terminal_if_it_is_wanted(
    idle: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    idle.generate(PROMPTS, GREEDY, progress=False)
    assert capsys.readouterr().err == ""
    idle.generate(PROMPTS, GREEDY)
    out, err = capsys.readouterr()
    assert out == ""
    assert "generating" in err
    assert "100 %" in err


def test_warnings_of_the_engine_go_to_the_logging_of_the_program(
    folder: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    handlers = logging.getLogger().handlers[:]
    with LLM(str(folder), **(OPTIONS | {"plan": "bf16/fp8"})):
        pass
    assert "no calibrated scales" in caplog.text
    assert logging.getLogger().handlers == handlers
    assert capfd.readouterr().out == ""


def test_the_default_model_answers_alone_as_in_a_batch(smollm2: ModelSource) -> None:
    with LLM("smollm2-135m", max_model_len=512, cache_memory="64MiB") as llm:
        assert llm.plan == "weights=int4:g32:z,cache=bf16,head=int8:g32 page=16"
        prompts = ["The capital of France is", "1, 2, 3, 4,", "Once upon a time"]
        batch = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, logprobs=1))
        alone = [llm.generate(p, temperature=0, max_tokens=8, logprobs=1)[0] for p in prompts]
        assert [output.outputs for output in batch] == [output.outputs for output in alone]
        assert batch[1].text.startswith(" 5, 6")
