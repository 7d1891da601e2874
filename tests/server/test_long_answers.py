"""A long answer is built in parts, so that other requests of the event loop have their turns."""

import asyncio

import pytest

from bifolio.request import TokenLogprobs
from bifolio.server import chat_completions, completions
from bifolio.server.generation import PACE, AnswerPiece
from bifolio.server.prepare import EncodedPrompt
from support.text import byte_tokenizer

PARTS = 4
LENGTH = PARTS * PACE
ENTRY = TokenLogprobs(-1.0, 1, [(98, -1.5)])


def echo():
    prompt = EncodedPrompt([97] * LENGTH)
    choice = completions._CompletionChoice(byte_tokenizer(), prompt, 0, ())
    return choice.prompt_logprobs([None] + [ENTRY] * (LENGTH - 1))


def conversation():
    pieces = [AnswerPiece(0, "a", [97], [ENTRY])] * (LENGTH - 1)
    return chat_completions._choice(
        byte_tokenizer(), 0, [*pieces, AnswerPiece(0, "", [97], [ENTRY], None, "length")]
    )


@pytest.mark.parametrize("build", [echo, conversation])
async def test_others_have_turns_while_a_long_answer_is_built(build):
    job = asyncio.create_task(build())
    turns = 0
    while not job.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > PARTS
    assert len(str(await job)) > LENGTH


async def test_an_echo_that_is_built_in_parts_has_all_offsets():
    """Characters may be cut where the parts are: 4 bytes each, one token per byte."""
    text = "a" + "😀" * PACE
    ids = list(text.encode())
    choice = completions._CompletionChoice(byte_tokenizer(), EncodedPrompt(ids), 0, ())
    block = await choice.prompt_logprobs([None] + [ENTRY] * (len(ids) - 1))
    assert block["text_offset"][0] == 0
    assert block["text_offset"][1::4] == list(range(1, PACE + 1))
    assert len(block["tokens"]) == len(block["token_logprobs"]) == len(ids)
