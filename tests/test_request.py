"""Sampling parameters out of range are refused by name, before they reach an engine."""

from __future__ import annotations

import msgspec
import pytest

from bifolio.errors import RequestError
from bifolio.request import FinishReason, Output, Request, SamplingParams, TokenLogprobs

VOCAB = 100


def test_the_defaults_are_in_range() -> None:
    SamplingParams().check(VOCAB)


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("max_tokens", [1, 10**9], [0, -1]),
        ("temperature", [0.0, 100.0], [-0.1, 100.1, float("nan"), float("inf")]),
        ("top_k", [0, 10**6, 2**63 - 1], [-1, 2**63, 10**30]),
        ("top_p", [0.0, 1e-9, 1.0], [1.1, -1.0, float("nan")]),
        ("min_p", [0.0, 1.0], [-0.1, 1.1]),
        ("repetition_penalty", [0.01, 100.0], [0.0, -1.0, 101.0, float("nan")]),
        ("frequency_penalty", [-2.0, 2.0], [-2.1, 2.1]),
        ("presence_penalty", [-2.0, 2.0], [-2.1, float("nan")]),
        ("logprobs", [None, 0, 20], [-1, 21]),
        ("prompt_logprobs", [None, 0, 20], [-1, 21]),
        ("seed", [0, 2**64 - 1], [-1, 2**64]),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_name(
    name: str, inside: list[object], outside: list[object]
) -> None:
    for value in inside:
        SamplingParams(**{name: value}).check(VOCAB)  # type: ignore[arg-type]
    for value in outside:
        with pytest.raises(RequestError, match=name) as refused:
            SamplingParams(**{name: value}).check(VOCAB)  # type: ignore[arg-type]
        assert refused.value.param == name


def test_a_long_value_is_cut_in_the_message() -> None:
    for sampling in (SamplingParams(top_k=10**4000), SamplingParams(logit_bias={10**4000: 1.0})):
        with pytest.raises(RequestError, match=r"1000+… must be at least 0") as refused:
            sampling.check(VOCAB)
        assert len(str(refused.value)) < 200


@pytest.mark.parametrize("token", [-1, VOCAB, VOCAB + 1, 2**63])
def test_every_field_of_token_ids_is_held_to_the_vocabulary(token: int) -> None:
    for sampling, param in (
        (SamplingParams(logit_bias={token: 1.0}), "logit_bias"),
        (SamplingParams(stop_token_ids=(1, token)), "stop_token_ids"),
    ):
        with pytest.raises(RequestError, match=f"token id {token}") as refused:
            sampling.check(VOCAB)
        assert refused.value.param == param
    inside = SamplingParams(logit_bias={0: -100.0, VOCAB - 1: 100.0}, stop_token_ids=(0, VOCAB - 1))
    inside.check(VOCAB)


def test_a_logit_bias_is_bounded() -> None:
    for bias in (-100.1, 100.1, float("nan")):
        with pytest.raises(RequestError, match="logit_bias"):
            SamplingParams(logit_bias={3: bias}).check(VOCAB)


def test_no_more_tokens_can_be_demanded_than_are_allowed() -> None:
    SamplingParams(min_tokens=5, max_tokens=5).check(VOCAB)
    with pytest.raises(RequestError, match=r"min_tokens: value 6 must be .* at most 5"):
        SamplingParams(min_tokens=6, max_tokens=5).check(VOCAB)


def test_requests_and_outputs_travel_unchanged() -> None:
    request = Request(
        id="r1", prompt_ids=[1, 2], sampling=SamplingParams(logit_bias={7: 1.5}), cache_salt="ä"
    )
    logprobs = TokenLogprobs(-0.5, 1, [(3, -0.5), (4, -1.0)])
    output = Output(
        id="r1",
        tokens=[3],
        logprobs=[logprobs],
        prompt_logprobs=[None, logprobs],
        finish=FinishReason.STOP,
        stop_id=3,
    )
    for value in (request, output):
        wire = msgspec.msgpack.encode(value)
        assert msgspec.msgpack.decode(wire, type=type(value)) == value
