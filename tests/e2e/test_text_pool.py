"""The text processes: what a body or a template makes long or large ends there and only there."""

import asyncio
import contextlib
import json
import time

import pytest
from starlette.requests import Request

from bifolio.errors import ConfigError, OverloadedError, RequestError
from bifolio.server.app import BodyReader
from bifolio.server.prepare import BodyRoute, prepare
from bifolio.server.text_pool import LARGE_BYTES, TextPool
from bifolio.text.prompt_ids import MAX_VALUES, TextLimits
from bifolio.text.tokenizer_files import load_text_side
from support.tiny import write_tokenizer

LIMITS = TextLimits(max_model_len=4096, vocab=320)
TEMPLATE = (
    "{{ messages[0].content }}"
    "{% for i in range(outer|default(1)) %}{% for j in range(inner|default(1)) %}{% endfor %}"
    "{% endfor %}{% if times %}{{ ('a' * times)|length }}{% endif %}"
)
LOOPS = {"outer": 99_999, "inner": 99_999}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    (folder / "config.json").write_text("{}")
    return folder


@contextlib.asynccontextmanager
async def pool_of(model, template=TEMPLATE, **options):
    pool = TextPool(str(model), template, **options)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop()


def chat(content="hello", **variables):
    messages = [{"role": "user", "content": content}]
    return json.dumps({"messages": messages, "chat_template_kwargs": variables}).encode()


async def ask(pool, data, client="a"):
    return await pool.prepare(BodyRoute.CHAT, data, LIMITS, client)


async def test_a_body_is_prepared_as_it_would_be_in_the_server(model):
    body = json.dumps({"prompt": ["the sea", [1, 2]], "max_tokens": 5, "user": "x"}).encode()
    async with pool_of(model) as pool:
        there = await pool.prepare(BodyRoute.COMPLETION, body, LIMITS, "a")
    assert there == prepare(BodyRoute.COMPLETION, body, load_text_side(model, TEMPLATE), LIMITS)
    fields = there.body(BodyRoute.COMPLETION)
    assert (fields.max_tokens, fields.prompt) == (5, "")


async def test_a_request_that_takes_too_long_is_refused_and_the_next_is_served(model):
    async with pool_of(model, job_seconds=1.0) as pool:
        with pytest.raises(RequestError, match="more than 1 s"):
            await ask(pool, chat(**LOOPS))
        assert (await ask(pool, chat())).prompts[0].ids


async def test_a_request_that_takes_too_much_memory_is_refused_and_the_next_is_served(model):
    async with pool_of(model) as pool:
        with pytest.raises(RequestError, match="memory"):
            await ask(pool, chat(times=10**10))
        assert (await ask(pool, chat())).prompts[0].ids


async def test_a_long_job_of_one_client_does_not_hold_up_another(model):
    async with pool_of(model) as pool:
        long = asyncio.create_task(ask(pool, chat(**LOOPS), "a"))
        await asyncio.sleep(0)
        assert (await ask(pool, chat(), "b")).prompts[0].ids
        assert not long.done()
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)


async def test_large_bodies_occupy_one_process_at_most(model):
    async with pool_of(model) as pool:
        large = chat("x" * LARGE_BYTES, **LOOPS)
        jobs = [asyncio.create_task(ask(pool, large, name)) for name in "abc"]
        await asyncio.sleep(0)
        assert (await ask(pool, chat(), "d")).prompts[0].ids
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)


async def test_a_job_ends_when_its_client_has_gone(model):
    """Running: its process is replaced. Waiting: it is never run, so the lane is free at once."""
    async with pool_of(model, workers=1, job_seconds=600.0) as pool:
        jobs = [asyncio.create_task(ask(pool, chat(**LOOPS))) for _ in range(3)]
        await asyncio.sleep(0.05)
        for job in jobs:
            job.cancel()
        assert (await ask(pool, chat())).prompts[0].ids


async def test_a_process_that_dies_ends_its_own_job_only(model):
    async with pool_of(model) as pool:
        long = asyncio.create_task(ask(pool, chat(**LOOPS), "a"))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(ask(pool, chat(), "a"))
        await asyncio.sleep(0)
        next(worker for worker in pool._workers if worker.running is not None).process.kill()
        with pytest.raises(RequestError, match="cannot be read"):
            await long
        assert (await waiting).prompts[0].ids


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ messages|tojson(indent=10**9) }}",
        "{{ messages[0].content|center(10**10) }}",
        "{{ [1]|slice(10**9)|list }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    ],
    ids=["loops", "repetition", "indent", "center", "slice", "nesting"],
)
async def test_a_template_that_explodes_is_refused_at_the_start_in_bounded_time(model, template):
    began = time.monotonic()
    with pytest.raises(ConfigError, match="template"):
        async with pool_of(model, template, start_seconds=3.0):
            pass
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("field", ["messages", "tools", "chat_template_kwargs"])
def test_the_number_of_values_in_a_body_is_bounded(model, field):
    body = {"messages": [{"role": "user", "content": "x"}]}
    many = [[] for _ in range(MAX_VALUES)]
    if field == "chat_template_kwargs":
        body[field] = {"x": many}
    elif field == "tools":
        function = {"name": "f", "parameters": {"x": many}}
        body |= {"tool_choice": "none", field: [{"type": "function", "function": function}]}
    else:
        body["messages"][0]["x"] = many
    text = load_text_side(model, TEMPLATE)
    with pytest.raises(RequestError, match=f"{field}: more than {MAX_VALUES} values"):
        prepare(BodyRoute.CHAT, json.dumps(body).encode(), text, LIMITS)


@pytest.mark.parametrize("route", list(BodyRoute))
def test_deep_nesting_is_a_clear_refusal(model, route):
    deep = "[" * 100_000 + "]" * 100_000
    data = f'{{"messages": {deep}, "prompt": {deep}, "tokens": {deep}}}'.encode()
    with pytest.raises(RequestError):
        prepare(route, data, load_text_side(model), LIMITS)


def test_a_text_beyond_the_context_is_refused_before_it_is_cut(model):
    digits = json.dumps({"prompt": "1" * 2_000_000}).encode()
    text = load_text_side(model)
    text.tokenizer.encode = None  # whoever calls it fails
    for route in (BodyRoute.TOKENIZE, BodyRoute.COMPLETION):
        with pytest.raises(RequestError, match="characters") as refused:
            prepare(route, digits, text, LIMITS)
        assert refused.value.code == "context_length_exceeded"


async def test_names_of_tokens_come_on_request_only(model):
    text = load_text_side(model)
    plain = prepare(BodyRoute.TOKENIZE, b'{"prompt": "the sea"}', text, LIMITS)
    named = prepare(
        BodyRoute.TOKENIZE, b'{"prompt": "the sea", "return_token_strs": true}', text, LIMITS
    )
    assert plain.names is None
    assert len(named.names) == len(named.prompts[0].ids)


async def test_bodies_together_are_bounded_and_what_is_done_counts_no_more():
    bodies = BodyReader(most=100)
    async with bodies.read(request_of(b"x" * 60), 80) as first:
        assert len(first) == 60
        with pytest.raises(OverloadedError):
            async with bodies.read(request_of(b"x" * 60), 80):
                pass
        async with bodies.read(request_of(b"x" * 40), 80):
            pass
    async with bodies.read(request_of(b"x" * 80), 80):
        pass


def request_of(body):
    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    return Request({"type": "http", "headers": []}, receive)
