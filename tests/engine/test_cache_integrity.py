"""A page that is not what its request wrote ends that request before a token of it is sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from bifolio.config import EngineConfig
from bifolio.engine.engine import Engine
from bifolio.engine.runner import ModelRunner, RunnerLimits, Tamper
from bifolio.engine.sampler import Sampler
from bifolio.formats import Phase, PrecisionPlan
from bifolio.kernels.ops import Batch
from bifolio.pages.kv_pool import KVPool
from bifolio.request import ErrorCode, FinishReason, Output, Request, SamplingParams
from bifolio.scheduler.step import StepRow
from bifolio.spec.page import HEADER_TAG
from support.faults import VICTIM_SEED, CacheFault, tamper_with
from support.tiny import tiny_config, write_model

AFTER = 3
ANSWER = 24
PROMPTS = {name: [(7 * i + shift) % 300 + 3 for i in range(40)] for shift, name in enumerate("abv")}
"""The prompts of two neighbours, a and b, and of the victim, v."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), tiny_config("llama"))


def start(folder: Path, tamper: Tamper | None = None, *, integrity: bool = True) -> Engine:
    config = EngineConfig(
        model=str(folder),
        plan=PrecisionPlan.parse("bf16/bf16"),
        kernels="reference",
        cache_memory=2**20,
        max_model_len=128,
        integrity=integrity,
    )
    return Engine(config, tamper=tamper)


def run(engine: Engine) -> dict[str, list[Output]]:
    for name, prompt in PROMPTS.items():
        seed = VICTIM_SEED if name == "v" else 1
        sampling = SamplingParams(max_tokens=ANSWER, temperature=0.7, ignore_eos=True, seed=seed)
        engine.add(Request(id=name, prompt_ids=prompt, sampling=sampling))
    news: dict[str, list[Output]] = {name: [] for name in PROMPTS}
    while engine.has_work:
        for output in engine.step():
            news[output.id].append(output)
        engine.scheduler.check_invariants()
    return news


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


@pytest.fixture(scope="module")
def clean(folder: Path) -> dict[str, list[int]]:
    news = run(start(folder))
    assert all(outputs[-1].finish is FinishReason.LENGTH for outputs in news.values())
    return {name: tokens(outputs) for name, outputs in news.items()}


@pytest.mark.parametrize("fault", CacheFault)
def test_fault_ends_the_victim_alone_and_in_time(
    folder: Path, clean: dict[str, list[int]], fault: CacheFault
) -> None:
    engine = start(folder, tamper_with(fault, after=AFTER))
    news = run(engine)
    last = news["v"][-1]
    assert (last.finish, last.error_code) == (FinishReason.ERROR, ErrorCode.CACHE_INTEGRITY)
    assert tokens(news["v"]) == clean["v"][:AFTER]
    assert {name: tokens(news[name]) for name in "ab"} == {name: clean[name] for name in "ab"}
    stats = engine.stats()
    assert (stats.integrity_faults, stats.quarantined_pages) == (1, 1)


@pytest.mark.parametrize("fault", CacheFault)
def test_without_the_check_the_same_fault_sends_wrong_tokens(
    folder: Path, clean: dict[str, list[int]], fault: CacheFault
) -> None:
    news = run(start(folder, tamper_with(fault, after=AFTER), integrity=False))
    assert news["v"][-1].finish is FinishReason.LENGTH
    assert tokens(news["v"]) != clean["v"]


class LateWriter:
    """A model during whose pass somebody else writes into the victim's first page."""

    def __init__(self, forward: Callable[..., Tensor], pool: KVPool) -> None:
        self._forward = forward
        self._pool = pool
        self.page: int | None = None

    def forward(self, *arguments: object) -> Tensor:
        if self.page is not None:
            self._pool.headers[self.page, HEADER_TAG] += 1
            self.page = None
        return self._forward(*arguments)


def test_writer_that_comes_between_the_checks_is_caught_before_the_token_is_sent(
    folder: Path, clean: dict[str, list[int]]
) -> None:
    def choose_page(pool: KVPool, batch: Batch, rows: list[StepRow]) -> None:
        for row in rows:
            if row.sampling.seed == VICTIM_SEED and row.end - row.prompt_len == AFTER:
                model.page = row.page_ids[0]

    engine = start(folder)
    model = LateWriter(engine.models.decode.forward, engine.pool)
    engine.runner = ModelRunner(
        dict.fromkeys(Phase, model),
        engine.pool,
        Sampler(engine.kernels.sampling, engine.spec.stop_ids, engine.tokens),
        RunnerLimits(512, 8, 128),
        page_kernels=engine.kernels.pages,
        tamper=choose_page,
    )
    news = run(engine)
    assert news["v"][-1].error_code is ErrorCode.CACHE_INTEGRITY
    assert tokens(news["v"]) == clean["v"][:AFTER]
    assert tokens(news["a"]) == clean["a"]


def test_every_answer_tells_how_many_pages_were_checked(folder: Path) -> None:
    news = run(start(folder))
    # 40 + 24 tokens: the last token's keys are never needed, so 63 positions in 4 pages; each
    # step checks the pages in use twice.
    pages = [-(-(40 + i) // 16) for i in range(ANSWER)]
    assert {news[name][-1].pages_checked for name in PROMPTS} == {2 * sum(pages)}
    unchecked = run(start(folder, integrity=False))
    assert {unchecked[name][-1].pages_checked for name in PROMPTS} == {0}
