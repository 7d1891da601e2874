"""Stop strings, echo and log probabilities: streamed and whole answers say the same."""

import itertools

import pytest

from bifolio.testing.text import FIRST_WORD

pytestmark = pytest.mark.asyncio(loop_scope="session")

ID_OF = {word: FIRST_WORD + i for i, word in enumerate(["hello", " world", "ab", "bc", "abc"])}


def cuts(text):
    """Every way to write the text with the tiny vocabulary's bytes and words."""
    if not text:
        yield []
        return
    for rest in cuts(text[1:]):
        yield [ord(text[0]), *rest]
    for word in ("ab", "bc", "abc"):
        if text.startswith(word):
            for rest in cuts(text[len(word) :]):
                yield [ID_OF[word], *rest]


async def streamed(client, **body):
    """Texts, finish reasons and stop reasons of a streamed completion, by choice."""
    texts, ends = {}, {}
    async for chunk in await client.completions.create(model="tiny", stream=True, **body):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                assert choice.index not in ends
                ends[choice.index] = (choice.finish_reason, choice.stop_reason)
    return texts, ends


async def test_stop_strings_cut_every_tokenisation_alike_streamed_or_not(tiny):
    """The text is "xabcx"; "ab" is complete first, whatever the tokens are."""
    prompts = list(cuts("xabcx"))
    assert len(prompts) == 4
    body = {"prompt": prompts, "stop": ["ab", "bc"], "temperature": 0, "max_tokens": 20}
    whole = await tiny.openai.completions.create(model="tiny", **body)
    assert [(c.text, c.finish_reason, c.stop_reason) for c in whole.choices] == [
        ("x", "stop", "ab")
    ] * 4
    texts, ends = await streamed(tiny.openai, **body)
    assert set(texts.values()) == {"x"}
    assert set(ends.values()) == {("stop", "ab")}
    included = await streamed(tiny.openai, **body, extra_body={"include_stop_str_in_output": True})
    assert set(included[0].values()) == {"xab"}


async def test_an_unfinished_stop_string_is_shown_at_the_end(tiny):
    body = {"prompt": "xxab", "stop": "abc", "temperature": 0, "max_tokens": 20}
    assert await streamed(tiny.openai, **body) == ({0: "xxab"}, {0: ("stop", None)})
    body["max_tokens"] = 3
    assert await streamed(tiny.openai, **body) == ({0: "xxa"}, {0: ("length", None)})


async def test_a_chat_is_cut_alike(tiny):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "one two three"}]}
    body |= {"stop": [" tw", "thr"], "temperature": 0}
    whole = await tiny.openai.chat.completions.create(**body)
    assert whole.choices[0].message.content == "user\none"
    text = ""
    async for chunk in await tiny.openai.chat.completions.create(stream=True, **body):
        text += chunk.choices[0].delta.content or ""
    assert text == "user\none"


async def test_a_stop_string_ends_the_work_of_the_engine(tiny):
    body = {"prompt": "ab", "stop": "bab", "temperature": 0, "max_tokens": 400}
    answer = await tiny.openai.completions.create(
        model="tiny", **body, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].text == "a"
    assert answer.usage.completion_tokens == 4
    await tiny.until_idle()


async def test_characters_are_never_split_in_a_stream(tiny):
    prompt = "ž😀é"
    stream = await tiny.openai.completions.create(
        model="tiny", prompt=prompt, temperature=0, stream=True
    )
    pieces = [chunk.choices[0].text async for chunk in stream]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) == prompt


async def test_chat_logprobs_have_one_entry_for_each_token(tiny):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "ž"}], "temperature": 0}
    body |= {"logprobs": True, "top_logprobs": 2}
    whole = await tiny.openai.chat.completions.create(**body)
    entries = whole.choices[0].logprobs.content
    assert len(entries) == whole.usage.completion_tokens
    assert bytes(b for e in entries for b in e.bytes) == "<|im_start|>user\nž<|im_end|>".encode()
    assert entries[6].bytes == [0xC5]
    assert [(t.token, t.logprob) for t in entries[1].top_logprobs] == [("u", -0.25), ("v", -0.75)]
    streamed_entries = []
    async for chunk in await tiny.openai.chat.completions.create(stream=True, **body):
        for choice in chunk.choices:
            streamed_entries += choice.logprobs.content if choice.logprobs else []
    assert streamed_entries == entries
    alone = await tiny.openai.chat.completions.create(**body | {"top_logprobs": 0})
    assert all(entry.top_logprobs == [] for entry in alone.choices[0].logprobs.content)


async def test_echo_with_logprobs_gives_every_position_streamed_or_not(tiny):
    body = {"model": "tiny", "prompt": "až<|im_start|>b", "temperature": 0, "max_tokens": 3}
    body |= {"echo": True, "logprobs": 1}
    for _ in range(2):  # the second time the prompt is in the cache
        whole = await tiny.openai.completions.create(**body)
        choice = whole.choices[0]
        assert choice.text == "až<|im_start|>b" + "až"
        assert choice.logprobs.tokens == [
            *["a", "bytes:\\xc5", "bytes:\\xbe", "<|im_start|>", "b"],
            *["a", "bytes:\\xc5", "bytes:\\xbe"],
        ]
        assert choice.logprobs.text_offset == [0, 1, 1, 2, 14, 15, 16, 16]
        assert choice.logprobs.token_logprobs == [None, *[-0.25] * 7]
        assert choice.logprobs.top_logprobs[0] is None
        assert choice.logprobs.top_logprobs[5] == {"a": -0.25}
    texts, blocks = [], []
    async for chunk in await tiny.openai.completions.create(**body, stream=True):
        texts.append(chunk.choices[0].text)
        blocks.append(chunk.choices[0].logprobs)
    assert "".join(texts) == choice.text
    for field in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        joined = list(itertools.chain.from_iterable(getattr(block, field) for block in blocks))
        assert joined == getattr(choice.logprobs, field)


async def test_echo_without_an_answer(tiny):
    body = {"model": "tiny", "prompt": ["ab", "xyz"], "temperature": 0, "max_tokens": 0}
    answer = await tiny.openai.completions.create(**body, echo=True)
    assert [(c.text, c.finish_reason) for c in answer.choices] == [
        ("ab", "length"),
        ("xyz", "length"),
    ]
    assert answer.usage.completion_tokens == 0
    scored = await tiny.openai.completions.create(**body, echo=True, logprobs=0)
    assert [len(c.logprobs.tokens) for c in scored.choices] == [2, 3]
    assert (
        await streamed(tiny.openai, **{k: v for k, v in body.items() if k != "model"}, echo=True)
    )[0] == {0: "ab", 1: "xyz"}


async def test_logprobs_of_a_completion_follow_the_stop(tiny):
    body = {"model": "tiny", "prompt": "abcd", "temperature": 0, "logprobs": 0, "stop": "cd"}
    choice = (await tiny.openai.completions.create(**body)).choices[0]
    assert choice.text == "ab"
    assert choice.logprobs.tokens == ["a", "b", "c", "d"]
    assert choice.logprobs.text_offset == [0, 1, 2, 3]
