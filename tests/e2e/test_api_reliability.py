"""Keys, limits, hang-ups, a dying or frozen engine, errors in mid-stream, and the last drain."""

import asyncio
import json
import os
import random
import signal
import time

import httpx
import openai
import pytest

from bifolio.server import streams
from support.e2e_harness import FAULT, HANG, KILL, PATIENCE, default_script, serving, until

SLOW = {"step_seconds": 0.01}
ENDLESS = {"model": "tiny", "prompt": "abc", "max_tokens": 90_000, "ignore_eos": True}
LASTING = SLOW | {"max_model_len": 100_000}
"""With these steps it takes a quarter of an hour: what ends it sooner is what a test does."""


def raw_request(path, body, headers=""):
    data = json.dumps(body).encode()
    headers = f"Host: localhost\r\nContent-Length: {len(data)}\r\n{headers}"
    head = f"POST {path} HTTP/1.1\r\n{headers}\r\n"
    return head.encode() + data


async def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def test_keys_are_needed_where_requests_are_and_nowhere_else():
    async with serving(api_keys=("first-key", "zweiter-schlüssel")) as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first-key"}):
            for path in ("/v1/models", "/v1/completions", "/tokenize", "/nowhere"):
                response = await server.http.post(path, headers=headers, json={})
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/ready", "/metrics", "/version", "/openapi.json"):
            assert (await server.http.get(path)).status_code == 200
        for key in ("first-key", "zweiter-schlüssel"):
            headers = {"Authorization": f"bearer {key}".encode()}
            assert (await server.http.get("/v1/models", headers=headers)).status_code == 200
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
        async with client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()


async def test_a_body_that_is_too_long_is_refused_before_it_is_read():
    async with serving(max_request_bytes=1000) as server:
        response = await server.post("/v1/completions", prompt="a" * 1000)
        assert response.status_code == 413
        assert "1000 bytes" in response.json()["error"]["message"]

        async def chunks():
            for _ in range(50):
                yield b"x" * 100

        response = await server.http.post("/v1/completions", content=chunks())
        assert response.status_code == 413
        reader, writer = await connect(server)
        writer.write(b"POST /tokenize HTTP/1.1\r\nContent-Length: 9999999999\r\n\r\n")
        assert b" 413 " in await asyncio.wait_for(reader.readline(), PATIENCE)
        writer.close()
        assert (await server.post("/tokenize", prompt="a")).status_code == 200


async def test_a_full_queue_is_a_429_with_a_time_to_wait():
    options = {"max_num_seqs": 1, "max_waiting": 2}
    async with serving(default_script(**LASTING), engine_options=options) as server:
        runs = asyncio.create_task(server.post("/v1/completions", **ENDLESS))
        await until(lambda: server.engine.stats.running == 1)
        waiting = [
            asyncio.create_task(server.post("/v1/completions", **body))
            for body in (ENDLESS | {"max_tokens": 20, "stream": stream} for stream in (False, True))
        ]
        await until(lambda: server.engine.stats.waiting == 2)
        for stream in (False, True):
            refused = await server.post("/v1/completions", **ENDLESS | {"stream": stream})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
        runs.cancel()
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]
        await server.until_idle()


async def test_a_request_of_which_a_part_finds_no_place_is_a_429_too():
    options = {"max_num_seqs": 1, "max_waiting": 2}
    async with serving(default_script(**LASTING), engine_options=options) as server:
        runs = asyncio.create_task(server.post("/v1/completions", **ENDLESS))
        await until(lambda: server.engine.stats.running == 1)
        for stream in (False, True):
            refused = await server.post("/v1/completions", **ENDLESS | {"stream": stream, "n": 3})
            assert refused.status_code == 429
        runs.cancel()
        await server.until_idle()


async def test_a_stream_in_the_queue_has_its_headers_and_is_kept_alive(monkeypatch):
    monkeypatch.setattr(streams, "KEEP_ALIVE_SECONDS", 0.01)
    options = {"max_num_seqs": 1}
    async with serving(default_script(**LASTING), engine_options=options) as server:
        runs = asyncio.create_task(server.post("/v1/completions", **ENDLESS))
        await until(lambda: server.engine.stats.running == 1)
        answers = []
        for path, body in [
            ("/v1/completions", ENDLESS | {"prompt": "hello", "max_tokens": 5, "stream": True}),
            ("/v1/chat/completions", CHATTY | {"max_tokens": 1, "stream": True}),
        ]:
            reader, writer = await connect(server)
            writer.write(raw_request(path, body, "Connection: close\r\n"))
            async with asyncio.timeout(PATIENCE):
                assert b" 200 " in await reader.readline()
                await reader.readuntil(b": keep-alive\n\n")
            answers.append((reader, writer))
        await until(lambda: server.engine.stats.waiting == 2)
        chat = await server.openai.chat.completions.create(
            model="tiny", messages=CHATTY["messages"], temperature=0, stream=True
        )
        runs.cancel()
        for reader, writer in answers:
            data = await reader.read()
            assert b'"finish_reason":"length"' in data
            assert b"data: [DONE]" in data
            writer.close()
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in chat])
        assert text.startswith("user")


CHATTY = {"model": "tiny", "max_tokens": 90_000, "ignore_eos": True}
CHATTY |= {"messages": [{"role": "user", "content": "a"}]}


async def test_a_client_that_hangs_up_frees_its_pages_at_once():
    async with serving(default_script(**LASTING)) as server:
        for path, body in [("/v1/completions", ENDLESS), ("/v1/chat/completions", CHATTY)]:
            for stream in (False, True):
                for moment in ("at once", "running", "after the first bytes"):
                    reader, writer = await connect(server)
                    writer.write(raw_request(path, body | {"stream": stream, "n": 2}))
                    await writer.drain()
                    if moment == "running":
                        await until(lambda: server.engine.stats.running == 2)
                    elif moment == "after the first bytes" and stream:
                        assert b" 200 " in await reader.readline()
                    writer.close()
                    await asyncio.sleep(0.02)
                    await server.until_idle()


async def test_a_client_that_hangs_up_in_the_queue_leaves_it():
    options = {"max_num_seqs": 1}
    async with serving(default_script(**LASTING), engine_options=options) as server:
        keep = asyncio.create_task(server.post("/v1/completions", **ENDLESS))
        await until(lambda: server.engine.stats.running == 1)
        _, writer = await connect(server)
        writer.write(raw_request("/v1/completions", ENDLESS | {"stream": True}))
        await until(lambda: server.engine.stats.waiting == 1)
        writer.close()
        await until(lambda: server.engine.stats.waiting == 0)
        assert server.engine.stats.running == 1
        assert not keep.done()  # so it is the one that runs
        keep.cancel()
        await server.until_idle()


async def test_many_clients_of_which_a_third_hang_up():
    options = {"max_num_seqs": 32}
    async with serving(default_script(step_seconds=0.001), engine_options=options) as server:
        health, rng = [], random.Random(1)
        texts = ["".join(rng.choices("abcdefgh", k=rng.randrange(1, 60))) for _ in range(200)]
        patience = [rng.random() * 0.3 for _ in texts]

        async def watch():
            while True:
                health.append((await server.http.get("/health")).status_code)
                await asyncio.sleep(0.05)

        async def one(i):
            reader, writer = await connect(server)
            text = texts[i]
            body = {"model": "tiny", "prompt": text, "temperature": 0, "max_tokens": 100}
            body |= {"stream": bool(i % 2)}
            writer.write(raw_request("/v1/completions", body, "Connection: close\r\n"))
            if i % 3 == 0:
                await asyncio.sleep(patience[i])
                writer.close()
                return
            data = (await reader.read()).decode()
            writer.close()
            if body["stream"]:
                lines = [line[6:] for line in data.splitlines() if line.startswith("data: {")]
                found = "".join(json.loads(line)["choices"][0]["text"] for line in lines)
                assert data.rstrip().endswith("0")
                assert "data: [DONE]" in data
            else:
                found = json.loads(data[data.index("{") :])["choices"][0]["text"]
            assert found == text

        watcher = asyncio.create_task(watch())
        await asyncio.gather(*(one(i) for i in range(200)))
        await server.until_idle()
        watcher.cancel()
        assert set(health) == {200}
        assert server.engine.stats.free_pages == default_script().pages


async def test_handlers_cancelled_at_random_moments_leave_nothing_behind():
    """The same through the client library, which closes connections in its own ways."""
    async with serving(default_script(**LASTING | {"step_seconds": 0.001})) as server:
        rng = random.Random(2)
        moments = [rng.random() / 10 for _ in range(300)]

        async def one(i):
            body = ENDLESS | {"stream": bool(i % 2), "n": 1 + i % 3}
            try:
                await asyncio.wait_for(server.post("/v1/completions", **body), moments[i])
            except (TimeoutError, httpx.HTTPError):
                return

        for start in range(0, 300, 50):
            await asyncio.gather(*(one(start + i) for i in range(50)))
        await server.until_idle()
        metrics = (await server.http.get("/metrics")).text
        assert "bifolio_frontend_open_requests 0.0" in metrics


async def test_an_error_of_a_stream_is_an_event_and_of_a_whole_answer_a_status():
    async with serving(default_script(**SLOW)) as server:
        body = {"model": "tiny", "prompt": [FAULT, 97], "temperature": 0}
        response = await server.post("/v1/completions", **body)
        assert (response.status_code, response.json()["error"]["code"]) == (500, "cache_integrity")
        response = await server.post("/v1/completions", **body, stream=True)
        assert response.status_code == 200
        error = json.loads(response.text.removeprefix("data: "))["error"]
        assert error["code"] == "cache_integrity"
        body["prompt"] = [97, 98] * 10 + [FAULT]
        body["max_tokens"] = 100
        response = await server.post("/v1/completions", **body)
        assert (response.status_code, response.json()["error"]["code"]) == (500, "cache_integrity")
        response = await server.post("/v1/completions", **body, stream=True)
        assert response.status_code == 200
        events = [line[6:] for line in response.text.splitlines() if line]
        assert json.loads(events[-1])["error"]["code"] == "cache_integrity"
        assert "[DONE]" not in events
        texts = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
        assert ("ab" * 10).startswith("".join(texts))  # what is not sent yet stays unsent
        with pytest.raises(openai.APIError, match="tag"):
            async for _ in await server.openai.completions.create(**body, stream=True):
                pass
        neighbour = await server.post("/v1/completions", model="tiny", prompt="xy", temperature=0)
        assert neighbour.json()["choices"][0]["text"] == "xy"
        await until(lambda: server.engine.stats.integrity_faults == 5)
        metrics = (await server.http.get("/metrics")).text
        assert "bifolio_cache_integrity_failures_total 5.0" in metrics
        assert 'bifolio_request_errors_total{code="cache_integrity"} 5.0' in metrics
        await server.until_idle()


async def test_a_killed_engine_is_a_503_and_a_clean_error_for_every_open_request():
    async with serving(default_script(**LASTING), beat_timeout=2 * PATIENCE) as server:
        streams = [
            asyncio.create_task(server.post("/v1/completions", **ENDLESS | {"stream": True}))
            for _ in range(5)
        ]
        whole = [asyncio.create_task(server.post("/v1/completions", **ENDLESS)) for _ in range(5)]
        await until(lambda: server.engine.stats.running == 10)
        start = time.monotonic()
        os.kill(server.engine.pid, signal.SIGKILL)
        answers = await asyncio.gather(*streams, *whole)
        assert time.monotonic() - start < PATIENCE  # nobody waited for a heartbeat
        for answer in answers[:5]:
            last = json.loads(answer.text.strip().splitlines()[-1][6:])
            assert last["error"]["code"] == "engine_unavailable"
        for answer in answers[5:]:
            assert answer.status_code == 503
            assert "engine process has ended" in answer.json()["error"]["message"]
        for path in ("/health", "/ready"):
            assert (await server.http.get(path)).status_code == 503
        assert (await server.post("/v1/completions", **ENDLESS)).status_code == 503
        assert (await server.http.get("/metrics")).status_code == 200


async def test_a_request_that_kills_the_engine_gets_a_clean_error_too():
    async with serving() as server:
        answer = await server.post("/v1/completions", model="tiny", prompt=[KILL], temperature=0)
        assert answer.status_code == 503


async def test_a_stopped_engine_is_a_503_until_it_goes_on_and_idleness_is_not():
    async with serving(default_script(hang_seconds=3.0), beat_timeout=0.6) as server:

        async def health(status):
            """Wait for it: on a busy machine any one heartbeat may be late."""
            async with asyncio.timeout(PATIENCE):
                while (answer := await server.http.get("/health")).status_code != status:
                    await asyncio.sleep(0.01)
            return answer

        await asyncio.sleep(0.7)  # longer than an engine may be silent
        await health(200)
        os.kill(server.engine.pid, signal.SIGSTOP)
        assert "not answered" in (await health(503)).json()["error"]["message"]
        assert (await server.http.get("/ready")).status_code == 503
        os.kill(server.engine.pid, signal.SIGCONT)
        await health(200)
        hung = asyncio.create_task(server.post("/v1/completions", model="tiny", prompt=[HANG]))
        await health(503)
        await hung
        await health(200)


async def test_the_end_waits_for_what_runs_and_takes_nothing_new():
    async with serving(default_script(**SLOW), drain_seconds=300) as server:
        body = ENDLESS | {"max_tokens": 150}
        jobs = [
            asyncio.create_task(server.post("/v1/completions", **body | {"stream": stream}))
            for stream in (False, True)
        ]
        await until(lambda: server.engine.open_requests == 2)
        server.server.stop()
        await until(lambda: server.server._service.draining)
        with pytest.raises(httpx.ConnectError):
            await server.http.get("/health")
        whole, streamed = await asyncio.gather(*jobs)
        assert whole.json()["usage"]["completion_tokens"] == 150
        assert "[DONE]" in streamed.text
    assert server.engine.open_requests == 0


async def test_the_end_does_not_wait_for_ever():
    async with serving(default_script(**LASTING), drain_seconds=0.5) as server:
        jobs = [
            asyncio.create_task(server.post("/v1/completions", **ENDLESS | {"stream": stream}))
            for stream in (False, True)
        ]
        await until(lambda: server.engine.stats.running == 2)
        start = time.monotonic()
        server.server.stop()
        whole, streamed = await asyncio.gather(*jobs)
        assert 0.3 < time.monotonic() - start < PATIENCE
        assert whole.status_code == 503
        assert "shutting down" in whole.json()["error"]["message"]
        assert "shutting down" in streamed.text.splitlines()[-2]


def metric_values(text):
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


async def test_answers_are_counted_once_by_how_they_ended_and_timed_if_they_are_whole():
    options = {"max_num_seqs": 2, "max_waiting": 2}
    async with serving(default_script(**LASTING), engine_options=options) as server:

        async def send(body, **more):
            reader, writer = await connect(server)
            writer.write(raw_request("/v1/completions", body | more))
            return reader, writer

        async def hang_up(*writers):
            for writer in writers:
                writer.close()
            await server.until_idle()

        body = ENDLESS | {"n": 2}
        running = [await send(body, stream=True)]
        await until(lambda: server.engine.stats.running == 2)
        assert b" 200 " in await running[0][0].readline()
        for stream in (False, True):  # one waits, one finds no place
            waiting = await send(body, stream=stream)
            await until(lambda: server.engine.stats.waiting == 2)
            assert (await server.post("/v1/completions", **body)).status_code == 429
            waiting[1].close()
            await until(lambda: server.engine.stats.waiting == 0)
        await hang_up(running[0][1])
        running = await send(body)
        await until(lambda: server.engine.stats.running == 2)
        await hang_up(running[1])
        _, half = await connect(server)
        half.write(raw_request("/v1/completions", body)[:-5])
        await until(lambda: [c.cycle for c in server.server.server_state.connections if c.cycle])
        half.close()
        # Of two choices one ends before the client hangs up.
        mixed = ENDLESS | {"prompt": ["abc", [97] * 40], "ignore_eos": False, "stream": True}
        reader, writer = await send(mixed)
        await reader.readuntil(b'"finish_reason":"stop"')
        await hang_up(writer)
        # Of two choices one meets a fault, which ends the other as well.
        faulty = ENDLESS | {"prompt": ["abc", [97, FAULT]], "stream": True}
        assert '"code":"cache_integrity"' in (await server.post("/v1/completions", **faulty)).text
        assert (await server.post("/v1/completions", **body, top_p=9)).status_code == 400
        assert (await server.http.get("/nowhere")).status_code == 404

        async def counted():
            text = (await server.http.get("/metrics")).text
            return {name: v for name, v in metric_values(text).items() if v}

        async with asyncio.timeout(PATIENCE):
            while (await counted()).get('bifolio_http_requests_total{status="499"}') != 6:
                await asyncio.sleep(0.01)
        values = await counted()
        counts = {
            name: value
            for name, value in values.items()
            if name.startswith(("bifolio_request_", "bifolio_http_")) and "_total" in name
        }
        del counts['bifolio_http_requests_total{status="200"}']
        assert counts == {
            'bifolio_request_success_total{finished_reason="abort"}': 2 + 2 * 2 + 2 + 1,
            'bifolio_request_success_total{finished_reason="stop"}': 1,
            'bifolio_request_errors_total{code="overloaded"}': 2 * 2,
            'bifolio_request_errors_total{code="cache_integrity"}': 2,
            'bifolio_http_requests_total{status="499"}': 6,
            'bifolio_http_requests_total{status="429"}': 2,
            'bifolio_http_requests_total{status="400"}': 1,
            'bifolio_http_requests_total{status="404"}': 1,
        }
        for name in ("time_to_first_token", "e2e_request_latency", "time_per_output_token"):
            assert values[f"bifolio_{name}_seconds_count"] == 1


async def test_metrics_tell_what_happened():
    async with serving() as server:
        body = {"model": "tiny", "prompt": "a" * 33, "temperature": 0, "max_tokens": 3}
        for _ in range(2):
            await server.post("/v1/completions", **body)
        await server.post("/v1/completions", **body | {"prompt": "xy", "stop": "y"})

        def all_over():  # a heartbeat may have come from the middle of the last request
            stats = server.engine.stats
            return stats.query_tokens == 68 and stats.running == 0

        await until(all_over)
        values = metric_values((await server.http.get("/metrics")).text)
    expected = {
        "bifolio_num_requests_running": 0,
        "bifolio_num_requests_waiting": 0,
        "bifolio_kv_cache_usage_perc": 0,
        "bifolio_prompt_tokens_total": 68,
        "bifolio_prefix_cache_queries_total": 68,
        "bifolio_prefix_cache_hits_total": 32,
        "bifolio_num_preemptions_total": 0,
        'bifolio_pages{state="free"}': 4096,
        'bifolio_pages{state="live"}': 0,
        'bifolio_pages{state="cached"}': 0,
        'bifolio_pages{state="quarantined"}': 0,
        "bifolio_cache_integrity_failures_total": 0,
        "bifolio_logits_faults_total": 0,
        'bifolio_request_success_total{finished_reason="length"}': 2,
        'bifolio_request_success_total{finished_reason="stop"}': 1,
        "bifolio_time_to_first_token_seconds_count": 3,
        "bifolio_e2e_request_latency_seconds_count": 3,
        "bifolio_time_per_output_token_seconds_count": 3,
    }
    assert {name: values[name] for name in expected} == expected
    assert values["bifolio_generation_tokens_total"] >= 8
    assert values["bifolio_pages_checked_total"] > 0
