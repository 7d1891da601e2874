"""Forced texts: what is not computed again changes no bit, and what is must be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bifolio.lab.eval.forced import ForcedText
from bifolio.lab.eval.subject import Setup, Subject, SubjectTokenizer
from support.tiny import tiny_config, write_model

TOKENS = 128
SHARED = list(range(10, 60))
CONTEXTS = [
    [*SHARED, 5, 6, 7],
    [*SHARED, 5, 9],
    [*SHARED],
    [*SHARED, 5, 9, 4, 3],
    [3, *SHARED],
    [3],
]
CONTINUATIONS = [[40, 41, 42], [9], [77, 5, 40, 41, 3]]


@pytest.fixture(scope="module", params=["bf16/bf16", "bf16/fp8:token->int8/fp8:token"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_model(folder, tiny_config())
    return Subject(Setup(str(folder), request.param), SubjectTokenizer(str(folder)), TOKENS)


def test_a_shared_beginning_is_not_computed_again_and_changes_no_bit(subject: Subject) -> None:
    one = subject.forced()
    for context in CONTEXTS:
        fresh = subject.forced().likelihoods(context, CONTINUATIONS)
        assert one.likelihoods(context, CONTINUATIONS) == fresh
    before = counted(one)
    one.likelihoods(CONTEXTS[0], [[1]])
    one.likelihoods(CONTEXTS[1], [[1]])
    assert before == [len(CONTEXTS[0]), 1]


def counted(forced: ForcedText) -> list[int]:
    """Notes how many context tokens each of the next calls computes."""
    counts: list[int] = []
    run = forced._run

    def counting(context, tokens, start, wanted, page_ids):
        counts.append(len(tokens))
        return run(context, tokens, start, wanted, page_ids)

    forced._run = counting  # type: ignore[method-assign]
    return counts


def test_a_generation_in_between_takes_the_pages_and_the_context_is_computed_again(
    subject: Subject,
) -> None:
    forced = subject.forced()
    expected = forced.likelihoods(CONTEXTS[0], CONTINUATIONS)
    subject.generate([[100, 101] * 30], 4, [])
    assert forced.likelihoods(CONTEXTS[0], CONTINUATIONS) == expected


def test_a_continuation_scored_alone_or_beside_others_has_the_same_bits(subject: Subject) -> None:
    together = subject.forced().likelihoods(CONTEXTS[0], CONTINUATIONS)
    alone = [subject.forced().likelihoods(CONTEXTS[0], [one])[0] for one in CONTINUATIONS]
    assert together == alone


def test_logits_come_in_chunks_and_are_those_of_one_piece(subject: Subject) -> None:
    chunked = torch.cat(
        list(ForcedText(subject.engine, chunk=2).logits(CONTEXTS[0], [1, 2, 3, 4, 5]))
    )
    whole = torch.cat(list(ForcedText(subject.engine).logits(CONTEXTS[0], [1, 2, 3, 4, 5])))
    assert torch.equal(chunked, whole)
    assert chunked.shape == (5, 320)
