"""The evaluation tells a broken plan from a sound one, and a plan from itself not at all."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bifolio.lab.eval.compare import Verdict
from bifolio.lab.eval.distance_run import DistanceRun, built_in_passages
from bifolio.lab.eval.subject import Setup, Subject, SubjectTokenizer
from bifolio.lab.eval.task_run import BuildSubject, Compared, TaskRun
from bifolio.lab.eval.tasks.selection import built_in, chosen
from support.plan_faults import PlanFault, faulty
from support.tiny import tiny_config, write_model

PLANS = {
    PlanFault.CACHE_SCALE: "bf16/fp8",
    PlanFault.SWAPPED_NIBBLES: "int4:g32/bf16",
    PlanFault.ZEROED_LAYER: "bf16/bf16",
}
FAULTS = pytest.mark.parametrize("fault", PLANS)
SMOLLM2 = "smollm2-135m"
TRAINED = str(Path(__file__).parents[2] / "checkpoint" / "tiny")
"""Of the DeepSeek-V3 shape: its cache holds latents."""


def distance_p(model: str, sides: tuple[str, str], build: BuildSubject, scored: int) -> float:
    """p that the candidate is no farther from the reference than its noise: 16 windows."""
    run = DistanceRun(built_in_passages(), contexts=(64,), scored=scored, count=8)
    reference, plan = sides
    setup, texts = Setup(model, reference), SubjectTokenizer(model)
    (found,) = run.measure(setup, [Setup(model, plan)], texts, build=(Subject, build))
    assert found.rows[-1].noise is not None
    return found.rows[-1].noise.p


def compared(plan: str, build: BuildSubject, items: int, kernels: str = "auto") -> Compared:
    run = TaskRun(chosen(built_in(items, seed=0), ["copy-identifiers", "kv"]), margin=0.05)
    sides = Setup(SMOLLM2, "bf16/bf16"), [Setup(SMOLLM2, plan, kernels)]
    (found,) = run.compare(*sides, SubjectTokenizer(SMOLLM2), build=(Subject, build))
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_model(folder, tiny_config(max_position_embeddings=4096))
    return str(folder)


@pytest.mark.parametrize("shape", ["a random llama", "the trained model"])
@FAULTS
def test_a_broken_plan_is_told_from_the_same_plan_unbroken(
    tiny: str, shape: str, fault: PlanFault
) -> None:
    """The reference has the same formats, so that nothing but the fault can be seen."""
    model = tiny if shape == "a random llama" else TRAINED
    assert distance_p(model, (PLANS[fault], PLANS[fault]), faulty(fault), scored=8) < 0.001


def test_a_plan_is_not_told_from_itself(tiny: str) -> None:
    """The same kernels give the same bits, which are nearer to themselves than any noise."""
    run = DistanceRun(built_in_passages(), contexts=(64,), scored=8, count=8)
    setup, texts = Setup(tiny, "bf16/bf16"), SubjectTokenizer(tiny)
    (found,) = run.measure(setup, [setup], texts)
    assert found.rows[-1].distance.kl == 0.0
    assert found.rows[-1].noise is not None
    assert found.rows[-1].noise.farther == 0


@pytest.mark.soak
@FAULTS
def test_the_default_model_shows_a_broken_plan_within_five_minutes(fault: PlanFault) -> None:
    started = time.monotonic()
    assert distance_p(SMOLLM2, ("bf16/bf16", PLANS[fault]), faulty(fault), scored=32) < 0.001
    found = compared(PLANS[fault], faulty(fault), items=24)
    assert all(c.verdict is not Verdict.EQUIVALENT for c in found.comparisons)
    assert any(c.likelihoods and c.likelihoods.p < 0.001 for c in found.comparisons)
    assert time.monotonic() - started < 300


@pytest.mark.soak
def test_the_default_model_is_equivalent_to_itself() -> None:
    found = compared("bf16/bf16", Subject, items=60)
    assert {c.verdict for c in found.comparisons} == {Verdict.EQUIVALENT}
    assert all(r == c for pair in found.answers for r, c in zip(*pair, strict=True))
