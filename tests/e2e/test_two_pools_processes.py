"""Two pools of real processes, killed, frozen, replaced, refused: answers stay the oracle's."""

import asyncio
import random
import signal
from pathlib import Path

import pytest
from test_two_pools_answers import all_cases, settings, text_of

from bifolio.config import TlsFiles
from bifolio.disagg.fleet import Fleet
from bifolio.errors import ConfigError
from support.e2e_harness import serving_client, until
from support.oracle import Oracle
from support.pool_cases import completion, essence
from support.pool_processes import PLAN, config, kill, pools, until_accounted, until_whole
from support.tiny import tiny_config, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("tiny"), tiny_config("llama")))


def prompts(count, seed=0):
    """Requests of many lengths; every third starts like another one."""
    rng = random.Random(seed)
    starts = [[rng.randrange(3, 300) for _ in range(90)] for _ in range(4)]
    found = []
    for i in range(count):
        prompt = rng.choice(starts)[: rng.randrange(1, 90)] if i % 3 == 0 else []
        prompt = prompt + [rng.randrange(3, 300) for _ in range(rng.randrange(1, 60))]
        body = {"max_tokens": rng.randrange(1, 40), "temperature": rng.choice([0, 0.9])}
        body |= {"seed": i, "ignore_eos": bool(i % 2), "logprobs": 1 if i % 4 == 0 else None}
        found.append(completion(prompt, **body))
    return found


async def expected_answers(model, requests):
    async with serving_client(Oracle(model, *PLAN), settings(model), text_of(model)) as oracle:
        return [essence((await oracle.post(path, **body)).text) for path, body in requests]


async def traffic(server, requests, expected, concurrency, after=None):
    """Send all; wrong answers, and how many ended in which clean error."""
    wrong, errors, done = [], {}, 0
    gate = asyncio.Semaphore(concurrency)

    async def one(i):
        nonlocal done
        path, body = requests[i]
        async with gate:
            answer = await server.http.post(path, json=body, timeout=600)
        done += 1
        if after is not None:
            after(done)
        if answer.status_code == 200:
            if essence(answer.text) != expected[i]:
                wrong.append((i, answer.text))
            return
        code = answer.json()["error"]["code"]
        errors[code] = errors.get(code, 0) + 1

    await asyncio.gather(*(one(i) for i in range(len(requests))))
    return wrong, errors


async def kill_each_once(model, count, concurrency, transport="shm"):
    requests = prompts(count)
    expected = await expected_answers(model, requests)
    async with pools(model, 2, 2, transport=transport) as server:
        router = server.engine
        alive, answers = ["d0", "p0", "d1", "p1"], 0

        def someone_is_left(name):
            """The other worker of the pool has not been killed, or has been replaced."""
            other = router.fleet.member(name.translate({ord("0"): "1", ord("1"): "0"}))
            return other.up and (other.name in alive or other.restarts == 1)

        def after(_done):
            nonlocal answers
            answers += 1
            if alive and answers >= count * (5 - len(alive)) // 6 and someone_is_left(alive[0]):
                kill(router, alive.pop(0))

        while alive:  # to replace a worker may take longer than all requests
            await until(lambda: someone_is_left(alive[0]), 300)
            wrong, errors = await traffic(server, requests, expected, concurrency, after)
            assert wrong == []
            assert errors == {}  # recomputed, all of them
        await until_whole(router, restarts=4)
        await until_accounted(router)
        assert router.resent["worker_lost"] > 0
        again, errors = await traffic(server, requests[:20], expected[:20], 8)
        assert (again, errors) == ([], {})
        await until_accounted(router)
        return router


@pytest.mark.timeout(1200)
async def test_each_worker_is_killed_once_and_no_answer_changes(model):
    await kill_each_once(model, 60, 8)


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_each_worker_is_killed_once_among_500_requests(model, transport):
    await kill_each_once(model, 500, 16, transport)


@pytest.mark.soak
async def test_a_worker_lost_in_mid_answer_ends_it_where_the_policy_says_so(model):
    """So many answers at once that they outlast several reports of the worker (one each 250 ms)."""
    async with pools(model, on_loss="fail") as server:
        path, body = completion([5, 6, 7], max_tokens=400, ignore_eos=True)
        asking = [
            asyncio.create_task(server.http.post(path, json=body, timeout=60)) for _ in range(24)
        ]
        await until(lambda: server.engine.fleet.member("d0").stats.running > 0, 20)
        kill(server.engine, "d0")
        answers = await asyncio.gather(*asking)
        lost = [answer for answer in answers if answer.status_code != 200]
        assert lost
        for answer in lost:
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "engine_unavailable"
        await until_whole(server.engine, restarts=1)
        assert (await server.post(path, **body | {"max_tokens": 3})).status_code == 200


@pytest.mark.soak
async def test_a_frozen_worker_is_replaced(model, monkeypatch):
    monkeypatch.setattr("bifolio.disagg.fleet.SILENCE_SECONDS", 3.0)
    async with pools(model) as server:
        router = server.engine
        for member in router.fleet.members:
            member.engine._beat_timeout = 2.0
        kill(router, "p0", signal.SIGSTOP)
        path, body = completion([5, 6, 7], max_tokens=5)
        assert (await server.http.post(path, json=body, timeout=90)).status_code == 200
        await until_whole(router, restarts=1)


@pytest.mark.soak
async def test_workers_are_replaced_one_by_one_without_a_lost_request(model):
    requests = prompts(120, seed=1)
    expected = await expected_answers(model, requests)
    async with pools(model, 2, 2) as server:
        router = server.engine

        replacing = asyncio.create_task(router.fleet.replace_all())
        wrong, errors = await traffic(server, requests, expected, 6)
        await replacing
        assert (wrong, errors) == ([], {})
        assert router.resent["worker_lost"] == 0
        assert [member.restarts for member in router.fleet.members] == [1, 1, 1, 1]
        await until_accounted(router)


@pytest.mark.soak
async def test_models_that_differ_are_refused_before_any_request(model, tmp_path):
    other = str(write_model(tmp_path, tiny_config("llama"), seed=1))

    fleet = Fleet([config(model, PLAN[0])], [config(other, PLAN[1])])
    with pytest.raises(ConfigError, match="weights differs"):
        await fleet.start()
    await fleet.stop()


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_all_cases_through_processes_sockets_and_router(model, transport):
    oracle, text = Oracle(model, *PLAN), text_of(model)
    requests = all_cases(oracle, text.tokenizer)
    expected = await expected_answers(model, requests)
    async with pools(model, transport=transport) as server:
        wrong, errors = await traffic(server, requests, expected, 4)
        assert (wrong, errors) == ([], {})
        await until_accounted(server.engine)


async def test_time_limits_end_requests_in_both_pools_and_leave_no_page_behind(model):
    requests = prompts(30, seed=2)
    expected = await expected_answers(model, requests)
    async with pools(model) as server:
        limits = [0.001, 0.05, 0.2, 600]
        late = [
            (path, body | {"timeout": limits[i % 4]}) for i, (path, body) in enumerate(requests)
        ]
        wrong, errors = await traffic(server, late, expected, 30)
        assert wrong == []
        assert set(errors) == {"deadline_exceeded"}
        assert errors["deadline_exceeded"] <= 23
        await until_accounted(server.engine)
        wrong, errors = await traffic(server, requests, expected, 30)
        assert (wrong, errors) == ([], {})


async def test_encrypted_hand_offs_change_no_answer(model):
    folder = Path(__file__).parents[1] / "disagg" / "tls"
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    path, body = completion([5, 6, 7] * 20, max_tokens=6, temperature=0)
    answers = []
    for tls in (None, TlsFiles(cert=cert, key=key, ca=cert)):
        async with pools(model, transport="tcp", tls=tls) as server:
            answers.append(essence((await server.post(path, **body)).text))
    assert answers[0] == answers[1]
