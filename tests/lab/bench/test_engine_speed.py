"""Plans in process beside their ceilings (`make bench`), on a tiny model."""

import pytest

from bifolio.lab.bench.engine_speed import FixedLengths, MeasuredPlan, compare
from bifolio.lab.plan.hardware import Device
from support.tiny import tiny_config, write_model

ONE, FOUR, PROMPT = (
    FixedLengths("one", 1, 20, 9),
    FixedLengths("four", 4, 20, 9),
    FixedLengths("prompt", 1, 40, 1),
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("tiny"), tiny_config("llama")))


def machine(factor: float = 1.0) -> Device:
    """So fast that the ceiling is far above whatever is measured."""
    return Device(
        name="far too fast",
        memory_bytes=2**34,
        read_bytes=factor * 1e15,
        bf16_ops=factor * 1e18,
        int8_ops=factor * 2e18,
        source="made up",
    )


def test_every_plan_is_measured_on_every_workload_in_every_repeat(tiny: str) -> None:
    plans = ("bf16/bf16", "bf16/bf16->int8/bf16")
    cells = compare(tiny, plans, (ONE, FOUR, PROMPT), machine(), repeats=2, cache_memory=2**24)
    assert [(c.plan, c.workload) for c in cells] == [
        (plan, work.name) for plan in plans for work in (ONE, FOUR, PROMPT)
    ]
    for cell in cells:
        assert len(cell.rates) == 2
        assert 0 < cell.rate.low <= cell.rate.middle <= cell.rate.high < cell.ceiling


def test_a_ceiling_grows_with_the_machine_and_every_request_has_to_succeed(tiny: str) -> None:
    one, two = (MeasuredPlan(tiny, "bf16/bf16", machine(f), 2**24) for f in (1.0, 2.0))
    for work in (ONE, FOUR, PROMPT):
        assert two.ceiling(work) == pytest.approx(2 * one.ceiling(work))
    with pytest.raises(RuntimeError, match=r"bf16/bf16, long: .*1 of 1 requests failed"):
        one.measure(FixedLengths("long", 1, 10**6, 2), 0)


def test_a_rate_is_of_decode_of_all_or_of_the_prompt(tiny: str) -> None:
    engine = MeasuredPlan(tiny, "bf16/bf16", machine(), 2**24)
    one, four, prompt = (engine.figures(work, 0) for work in (ONE, FOUR, PROMPT))
    assert one.latency is not None and one.ttft is not None
    assert ONE.rate(one) == pytest.approx(8 / (one.latency.mean - one.ttft.mean), rel=1e-3)
    assert FOUR.rate(four) == 4 * 9 / four.seconds
    assert PROMPT.rate(prompt) == 40 / prompt.seconds
