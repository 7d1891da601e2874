"""Stop strings, echo and log probabilities: streamed and whole answers say the same."""

import itertools
import json

import pytest

from support.text import FIRST_WORD

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


async def whole_and_streamed(tiny, path, **body):
    """Text, finish reason and stop reason of an answer, which are the same both ways."""
    body |= {"model": "tiny", "temperature": 0}
    whole = (await tiny.post(path, **body)).json()["choices"][0]
    text = whole["message"]["content"] if "message" in whole else whole["text"]
    streamed, end = "", None
    for line in (await tiny.post(path, stream=True, **body)).text.splitlines():
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            streamed += choice.get("text") or choice.get("delta", {}).get("content") or ""
            if choice["finish_reason"]:
                end = choice["finish_reason"], choice["stop_reason"]
    assert (streamed, *end) == (text, whole["finish_reason"], whole["stop_reason"])
    return text, *end, whole


@pytest.mark.parametrize("skip", [True, False])
async def test_a_stop_string_with_a_special_token_ends_the_answer_shown_or_hidden(tiny, skip):
    prompt = {"prompt": "foo<|im_start|>bar", "skip_special_tokens": skip, "max_tokens": 20}
    for stop, text in [("<|im_start|>", "foo"), ("o<|im_start|>", "fo"), ("t|>ba", "foo<|im_star")]:
        body = prompt | {"stop": [stop], "logprobs": 0}
        found = await whole_and_streamed(tiny, "/v1/completions", **body)
        if stop == "t|>ba" and skip:  # no special token's text stands in it
            assert found[:3] == ("foobar", "stop", None)
            assert found[3]["logprobs"]["text_offset"] == [0, 1, 2, 3, 3, 4, 5, 6]
            continue
        assert found[:3] == (text, "stop", stop)
        assert len(found[3]["logprobs"]["tokens"]) == (6 if stop == "t|>ba" else 4)
        body |= {"include_stop_str_in_output": True}
        found = await whole_and_streamed(tiny, "/v1/completions", **body)
        assert found[:3] == (text + stop, "stop", stop)
    chat = {"messages": [{"role": "user", "content": "hi"}], "skip_special_tokens": skip}
    for stop, text in [
        ("<|im_start|>", ""),
        ("<|im_end|>", "user\nhi"),
        ("i<|im_end|>", "user\nh"),
    ]:
        body = chat | {"stop": stop}
        start = "" if skip or not text else "<|im_start|>"
        found = await whole_and_streamed(tiny, "/v1/chat/completions", **body)
        assert found[:3] == (start + text, "stop", stop)


@pytest.mark.parametrize("stop", [None, "zz"])
async def test_an_answer_cut_inside_a_character_ends_before_it(tiny, stop):
    """Its bytes are in the log probabilities; nothing of them is in the text."""
    body = {"prompt": "a😀", "max_tokens": 3, "stop": stop, "logprobs": 0}
    for echo in (False, True):
        found = await whole_and_streamed(tiny, "/v1/completions", **body, echo=echo)
        start = "a😀" if echo else ""
        assert found[:3] == (start + "a", "length", None)
        block = found[3]["logprobs"]
        assert block["tokens"][-2:] == ["bytes:\\xf0", "bytes:\\x9f"]
        assert block["text_offset"][-3:] == [len(start), len(start) + 1, len(start) + 1]
    chat = {"messages": [{"role": "user", "content": "😀"}], "max_tokens": 8, "stop": stop}
    found = await whole_and_streamed(tiny, "/v1/chat/completions", **chat, logprobs=True)
    assert found[:2] == ("user\n", "length")
    assert [entry["bytes"] for entry in found[3]["logprobs"]["content"][-2:]] == [[0xF0], [0x9F]]
    by_token = {"prompt": "é", "stop_token_ids": [0xA9]}  # an end token inside a character
    found = await whole_and_streamed(tiny, "/v1/completions", **by_token)
    assert found[:3] == ("", "stop", 0xA9)


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
