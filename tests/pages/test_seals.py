"""A cached page whose bytes have changed is never used again, whoever would have reused it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bifolio.config import EngineConfig
from bifolio.engine.engine import Engine
from bifolio.formats import PrecisionPlan
from bifolio.kernels import native
from bifolio.pages.kv_pool import KVPool
from bifolio.pages.scrub import BEAT_SECONDS, Scrubber
from bifolio.request import ErrorCode, FinishReason, Output, Request, SamplingParams
from bifolio.server.server_metrics import ServerMetrics
from bifolio.spec.page import HEADER_FILL, HEADER_SEAL
from bifolio.stats import EngineStats
from support.tiny import tiny_config, write_model

PROMPT = [(7 * i) % 300 + 3 for i in range(40)]
"""Two full pages of 16, and a half."""
SETS = ("reference", "native") if native.available() else ("reference",)

Spoil = Callable[[KVPool, int], None]


def overwrite_a_byte(pool: KVPool, page: int) -> None:
    """A value becomes some 800."""
    record = pool.tensor.numpy()[page]
    record[pool.spec.layer_offset(0) + pool.spec.plane_bytes + 1] = 0x44


def exchange_keys(pool: KVPool, page: int) -> None:
    """Tokens 2 and 9 of the page get each other's keys, in all layers."""
    spec = pool.spec
    for layer in range(spec.layers):
        start = spec.layer_offset(layer)
        plane = pool.tensor.numpy()[page, start : start + spec.plane_bytes].view(np.uint16)
        keys = plane.reshape(spec.kv_heads, spec.head_dim // 2, spec.page_size, 2)
        keys[:, :, [2, 9]] = keys[:, :, [9, 2]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), tiny_config("llama"))


def start(folder: Path, kernels: str = "reference", **options: object) -> Engine:
    settings = {
        "plan": PrecisionPlan.parse("bf16/bf16"),
        "cache_memory": 2**20,
        "max_model_len": 128,
        "threads": 1,
    } | options
    return Engine(EngineConfig(model=str(folder), kernels=kernels, **settings))


def ask(name: str, prompt: list[int] | None = None, max_tokens: int = 12) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.8, ignore_eos=True, seed=5)
    return Request(id=name, prompt_ids=prompt or PROMPT, sampling=sampling)


def run(
    engine: Engine, *requests: Request, steps: int = 10_000, preempt_every: int = 0
) -> dict[str, list[Output]]:
    """Work until all is done, or for some steps; the latest arrival is preempted now and then."""
    news: dict[str, list[Output]] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work and steps:
        for output in engine.step():
            news.setdefault(output.id, []).append(output)
        engine.scheduler.check_invariants()
        steps -= 1
        running = list(engine.scheduler._running.values())
        if preempt_every and steps % preempt_every == 0 and running:
            engine.scheduler._preempt(running[-1])
    return news


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def cached_pages(engine: Engine) -> list[int]:
    return list(engine.scheduler.cache.tree.pages())


@pytest.mark.parametrize("kernels", SETS)
def test_pages_are_sealed_when_they_are_full_and_not_before(folder: Path, kernels: str) -> None:
    engine = start(folder, kernels)
    engine.add(ask("a", max_tokens=20))
    while engine.has_work:
        engine.step()
        headers = engine.pool.headers
        full = headers[:, HEADER_FILL] == 16
        assert (headers[full, HEADER_SEAL] != 0).all()
        assert not headers[~full, HEADER_SEAL].any()
    assert int(full.sum()) == 3


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("spoil", [overwrite_a_byte, exchange_keys])
@pytest.mark.parametrize("place", [0, 1])
def test_changed_bytes_end_the_next_request_and_are_then_computed_anew(
    folder: Path, kernels: str, spoil: Spoil, place: int
) -> None:
    engine = start(folder, kernels)
    first = tokens(run(engine, ask("first"))["first"])
    pages = cached_pages(engine)
    spoil(engine.pool, pages[place])
    (last,) = run(engine, ask("second"))["second"]
    assert (last.finish, last.error_code) == (FinishReason.ERROR, ErrorCode.CACHE_INTEGRITY)
    assert last.error is not None and f"page {pages[place]} does not hold the bytes" in last.error
    assert not last.tokens
    assert cached_pages(engine) == pages[:place], "what stood upon the page has left the tree too"
    third = run(engine, ask("third"))["third"]
    assert (tokens(third), third[-1].cached_tokens) == (first, 16 * place)
    stats = engine.stats()
    assert (stats.seal_failures, stats.integrity_faults, stats.quarantined_pages) == (1, 1, 1)
    assert stats.seals_checked == 2 + place


@pytest.mark.parametrize("spoil", [overwrite_a_byte, exchange_keys])
def test_without_integrity_the_same_changes_send_wrong_tokens(folder: Path, spoil: Spoil) -> None:
    engine = start(folder, integrity=False)
    first = tokens(run(engine, ask("first"))["first"])
    spoil(engine.pool, cached_pages(engine)[0])
    second = run(engine, ask("second"))["second"]
    assert second[-1].finish is FinishReason.LENGTH and second[-1].cached_tokens == 32
    assert tokens(second) != first
    assert engine.stats().seals_checked == 0


def test_a_broken_seal_also_ends_those_who_hold_the_page_since_before(folder: Path) -> None:
    engine = start(folder)
    run(engine, ask("writer"))
    other = [*PROMPT[:16], *range(100, 120)]
    run(engine, ask("holder"), ask("bystander", list(range(50, 90))), steps=3)
    overwrite_a_byte(engine.pool, cached_pages(engine)[0])
    news = run(engine, ask("newcomer", other))
    assert {name: outputs[-1].error_code for name, outputs in news.items()} == {
        "newcomer": ErrorCode.CACHE_INTEGRITY,
        "holder": ErrorCode.CACHE_INTEGRITY,
        "bystander": None,
    }
    assert not news["newcomer"][-1].tokens and len(news["holder"]) == 1
    stats = engine.stats()
    assert (stats.seal_failures, stats.integrity_faults, stats.quarantined_pages) == (1, 2, 1)


@pytest.mark.parametrize("plan", ["bf16/bf16", "fp8/fp8:token"])
def test_no_seal_breaks_by_itself(folder: Path, plan: str) -> None:
    """200 requests with common beginnings, in a small pool, some of them preempted."""
    settings = {"plan": PrecisionPlan.parse(plan), "max_step_tokens": 48}
    page = start(folder, SETS[-1], **settings).pool.spec.page_bytes
    engine = start(folder, SETS[-1], **settings, cache_memory=24 * page)
    chance = random.Random(3)
    roots = [[chance.randrange(3, 300) for _ in range(48)] for _ in range(3)]
    for batch in range(20):
        requests = []
        for i in range(10):
            prompt = chance.choice(roots)[: chance.randrange(1, 49)]
            prompt = prompt + [chance.randrange(3, 300) for _ in range(chance.randrange(4))]
            requests.append(ask(f"{batch}-{i}", prompt, chance.randrange(1, 24)))
        news = run(engine, *requests, preempt_every=5)
        assert {outputs[-1].finish for outputs in news.values()} == {FinishReason.LENGTH}
    stats = engine.stats()
    assert stats.seal_failures == stats.integrity_faults == 0
    assert stats.seals_checked > 200 and stats.preemptions > 50


def test_the_scrub_finds_damage_in_idle_pages_before_a_request_meets_it(folder: Path) -> None:
    engine = start(folder)
    first = tokens(run(engine, ask("first"))["first"])
    pages = cached_pages(engine)
    for _ in range(len(pages)):
        engine.scrub()
    assert cached_pages(engine) == pages
    assert engine.stats().seals_checked >= len(pages)
    overwrite_a_byte(engine.pool, pages[1])
    for _ in range(2 * len(pages)):
        engine.scrub()
    engine.scheduler.check_invariants()
    assert cached_pages(engine) == pages[:1]
    stats = engine.stats()
    assert (stats.seal_failures, stats.integrity_faults, stats.quarantined_pages) == (1, 0, 1)
    again = run(engine, ask("again"))["again"]
    assert (tokens(again), again[-1].cached_tokens) == (first, 16)


def test_the_scrub_ends_a_request_that_holds_a_damaged_page(folder: Path) -> None:
    engine = start(folder)
    run(engine, ask("holder"), steps=3)
    overwrite_a_byte(engine.pool, cached_pages(engine)[0])
    for _ in range(3):
        engine.scrub()
    (last,) = run(engine)["holder"]
    assert last.error_code is ErrorCode.CACHE_INTEGRITY and not last.tokens


def test_a_look_stops_at_its_time_and_goes_on_from_there(folder: Path) -> None:
    engine = start(folder)
    run(engine, ask("first", max_tokens=60))
    pages, seals = len(cached_pages(engine)), engine.runner.seals
    assert pages == 6 and seals is not None
    times = itertools.count(step=0.6 * BEAT_SECONDS)
    scrubber = Scrubber(engine.scheduler.cache, seals, clock=lambda: next(times))
    seen = []
    for _ in range(4):
        scrubber.look()
        seen.append(seals.checked)
    assert seen == [2, 4, 6, 8]


def test_without_integrity_nothing_is_scrubbed(folder: Path) -> None:
    engine = start(folder, integrity=False)
    run(engine, ask("first"))
    engine.scrub()
    assert engine.stats().seals_checked == 0


def test_metrics_tell_pages_checked_from_pages_that_failed() -> None:
    stats = EngineStats(seals_checked=31, seal_failures=2)
    hello = SimpleNamespace(pages=5, page_size=16)
    engine = SimpleNamespace(
        stats=stats, open_requests=0, hello=hello, workers=lambda: (), restarts=0
    )
    text = ServerMetrics(engine).text().decode()
    assert "bifolio_kv_cache_tokens 80.0" in text
    assert "bifolio_page_seals_checked_total 31.0" in text
    assert "bifolio_page_seal_failures_total 2.0" in text
