"""The API over the real engine and a tiny random model."""

import asyncio
import json
import random

import pytest
import pytest_asyncio

from bifolio.config import EngineConfig
from bifolio.formats import PrecisionPlan
from bifolio.process.client import ENGINE_FACTORY
from bifolio.text.tokenizer_files import load_text_side
from support.e2e_harness import serving_over, until
from support.faults import VICTIM_SEED
from support.tiny import tiny_config, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny"), tiny_config("llama"))


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Torch's threads in the engine process would wait for each other on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(folder):
    """One server for the tests that leave it as it was."""
    async with over(folder, max_num_seqs=48) as running:
        yield running


def over(folder, factory=ENGINE_FACTORY, request_timeout=None, **options):
    """A server with the model of `folder`, on one thread."""
    fields = {"threads": 1, "cache_memory": 2**21, "max_model_len": 256}
    config = EngineConfig(
        model=str(folder), plan=PrecisionPlan.parse("bf16/bf16"), **(fields | options)
    )
    text = load_text_side(folder)
    return serving_over(config, factory, text, request_timeout=request_timeout)


PROMPT = "The quick brown fox"


async def complete(server, **body):
    response = await server.post("/v1/completions", **{"model": "tiny", "prompt": PROMPT} | body)
    return response.json()


async def test_answers_repeat_streamed_or_not_cold_or_warm_alone_or_in_a_batch(server):
    body = {"temperature": 0.9, "seed": 7, "max_tokens": 20, "ignore_eos": True}
    cold = await complete(server, **body, cache_salt="a")
    warm = await complete(server, **body, cache_salt="a", n=3)
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] in (0, 16)
    text = cold["choices"][0]["text"]
    assert warm["choices"][0]["text"] == text
    assert len({choice["text"] for choice in warm["choices"]}) == 3
    neighbours = [complete(server, prompt=f"x{i}" * i, max_tokens=30) for i in range(1, 12)]
    found, *_ = await asyncio.gather(complete(server, **body), *neighbours)
    assert found["choices"][0]["text"] == text
    response = await server.post(
        "/v1/completions", model="tiny", prompt=PROMPT, stream=True, **body
    )
    events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    assert "".join(json.loads(e)["choices"][0]["text"] for e in events) == text


END = 2
"""Id of `<|im_end|>` in the tiny tokenizer."""


@pytest.mark.parametrize("declared", ["generation_config", "tokenizer"])
async def test_an_end_token_counts_wherever_it_is_declared(tmp_path, declared):
    """A bias makes the model emit it at once; only one of the files names it."""
    config = tiny_config("llama", eos_token_id=5)
    write_model(tmp_path, config)
    files = {
        "generation_config": {"generation_config.json": {"eos_token_id": [5, END]}},
        "tokenizer": {"tokenizer_config.json": {"eos_token": "<|im_end|>"}},
    }
    unset = {"config.json": config, "generation_config.json": {}, "tokenizer_config.json": {}}
    for name, content in (unset | files[declared]).items():
        (tmp_path / name).write_text(json.dumps(content))
    async with over(tmp_path) as server:
        assert END in (await server.http.get("/v1/models")).json()["data"][0]["stop_token_ids"]
        body = {"logit_bias": {str(END): 100}, "max_tokens": 8, "temperature": 0}
        answer = await complete(server, **body)
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 1
        answer = await complete(server, **body, min_tokens=4)
        assert answer["usage"]["completion_tokens"] == 5
        answer = await complete(server, **body, ignore_eos=True)
        assert (answer["choices"][0]["finish_reason"]) == "length"


async def test_the_log_probabilities_of_a_prompt_are_the_same_cold_and_warm(server):
    body = {"prompt": PROMPT * 4, "echo": True, "logprobs": 2, "max_tokens": 2}
    body |= {"temperature": 0}
    first = await complete(server, **body)
    second = await complete(server, **body)
    blocks = [answer["choices"][0]["logprobs"] for answer in (first, second)]
    assert blocks[0] == blocks[1]
    count = first["usage"]["prompt_tokens"]
    assert len(blocks[0]["tokens"]) == count + first["usage"]["completion_tokens"]
    assert blocks[0]["token_logprobs"][0] is None
    assert all(value < 0 for value in blocks[0]["token_logprobs"][1:])
    scored = await complete(server, **body | {"max_tokens": 0})
    assert (
        scored["choices"][0]["logprobs"]["token_logprobs"] == (blocks[0]["token_logprobs"][:count])
    )


SECONDS_OF_WORK = {"max_tokens": 230, "n": 48, "ignore_eos": True}


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_an_answer_that_takes_longer_than_its_timeout_ends_as_an_error(server, path):
    words = {"prompt": "a"}
    if path.startswith("chat"):
        words = {"messages": [{"role": "user", "content": "a"}]}
    body = SECONDS_OF_WORK | words | {"max_tokens": 150, "timeout": 0.02}
    response = await server.post(f"/v1/{path}", model="tiny", **body)
    assert response.status_code == 504
    assert response.headers["x-should-retry"] == "false"
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("deadline_exceeded", "timeout_error")
    assert "the request's own timeout is 0.02 s: allow more" in error["message"]
    await server.until_idle()
    in_time = await complete(server, max_tokens=5, ignore_eos=True, timeout=3600)
    assert in_time["usage"]["completion_tokens"] == 5


async def test_a_stream_whose_time_is_over_ends_with_the_error_and_without_done(server):
    body = SECONDS_OF_WORK | {"model": "tiny", "prompt": PROMPT, "stream": True}
    for doubled in range(14):  # the first may be over before the first token
        response = await server.post("/v1/completions", **body, timeout=0.01 * 2**doubled)
        events = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        if len(events) > 1:
            break
    assert json.loads(events[0])["choices"]
    assert json.loads(events[-1])["error"]["code"] == "deadline_exceeded"
    await server.until_idle()


async def test_a_request_cannot_ask_for_more_time_than_the_server_gives(folder):
    async with over(folder, max_num_seqs=48, request_timeout=0.02) as server:
        for own in ({}, {"timeout": 3600}):
            answer = await complete(server, **SECONDS_OF_WORK, **own)
            assert answer["error"]["code"] == "deadline_exceeded"
            text = answer["error"]["message"]
            assert "more than 0.02 s: ask for fewer tokens" in text
            assert "allow more" not in text
        await server.until_idle()
        metrics = (await server.http.get("/metrics")).text
        assert 'code="deadline_exceeded"' in metrics


async def test_a_wrong_id_of_a_neighbour_changes_nothing(server):
    body = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    alone = await complete(server, **body)
    jobs = [asyncio.create_task(complete(server, **body)) for _ in range(4)]
    vocab = server.engine.hello.vocab
    for token in (-1, vocab, 2**63):
        refused = await complete(server, logit_bias={str(token): 50})
        assert refused["error"]["param"] == "logit_bias"
    assert {json.dumps(job["choices"]) for job in await asyncio.gather(*jobs)} == {
        json.dumps(alone["choices"])
    }


async def test_200_clients_of_which_a_third_hang_up(server):
    health, rng = [], random.Random(1)
    patience = [rng.random() * 2 for _ in range(200)]

    async def watch():
        while True:
            health.append((await server.http.get("/health")).status_code)
            await asyncio.sleep(0.1)

    async def one(i):
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = {"model": "tiny", "prompt": PROMPT[: 1 + i % 19], "ignore_eos": True}
        body |= {"max_tokens": 12, "stream": True, "seed": i}
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(data)}\r\n"
        writer.write(head.encode() + b"Host: localhost\r\nConnection: close\r\n\r\n" + data)
        try:
            if i % 3 == 0:
                await asyncio.sleep(patience[i])
                return None
            return (await reader.read()).decode()
        finally:
            writer.close()

    watcher = asyncio.create_task(watch())
    answers = await asyncio.gather(*(one(i) for i in range(200)))
    await server.until_idle()
    watcher.cancel()
    assert set(health) == {200}
    assert all("[DONE]" in answer for answer in answers if answer is not None)
    stats = server.engine.stats
    assert stats.free_pages + stats.cached_pages == server.engine.hello.pages
    assert stats.integrity_faults == 0


async def test_a_faulty_page_ends_its_request_before_a_token_and_no_other(folder, server):
    body = {"temperature": 0.8, "max_tokens": 24, "ignore_eos": True}
    expected = await complete(server, **body, seed=1)
    whole = (await complete(server, **body, seed=VICTIM_SEED))["choices"][0]["text"]
    async with over(folder, "support.e2e_tampered:create", prefix_cache=False) as tampered:
        victim, neighbour = await asyncio.gather(
            tampered.post(
                "/v1/completions",
                model="tiny",
                prompt=PROMPT,
                stream=True,
                seed=VICTIM_SEED,
                **body,
            ),
            complete(tampered, **body, seed=1),
        )
        events = [json.loads(line[6:]) for line in victim.text.splitlines() if line]
        assert events[-1]["error"]["code"] == "cache_integrity"
        text = "".join(event["choices"][0]["text"] for event in events[:-1])
        assert whole.startswith(text)
        assert len(text) < len(whole)
        assert neighbour["choices"] == expected["choices"]
        await until(lambda: tampered.engine.stats.integrity_faults == 1)
        assert (
            "bifolio_cache_integrity_failures_total 1.0"
            in (await tampered.http.get("/metrics")).text
        )
        await tampered.until_idle()
