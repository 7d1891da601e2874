"""Where formats win, what a token costs, and the best plan for a workload."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import pairwise

import pytest

from bifolio.errors import ConfigError
from bifolio.formats import PhasePlan, PrecisionPlan, WeightFormat
from bifolio.lab.plan.capacity import capacity
from bifolio.lab.plan.capacity_report import Question, answer
from bifolio.lab.plan.phases import best_choice, decode_choice, prefill_choice, weight_candidates
from bifolio.lab.plan.planned_workload import PlannedWorkload
from bifolio.lab.plan.published import compare_published, preset_deployment
from bifolio.lab.plan.roofline import step_time
from bifolio.lab.plan.speed import (
    TIE,
    cost_per_million,
    decode_ranges,
    decode_speeds,
    prefill_ranges,
    prefill_speed,
)
from bifolio.lab.plan.steps import Decode, Prefill
from bifolio.lab.plan.storage import as_published

GLM = preset_deployment("glm-5.2", "h200", 8)
KIMI = preset_deployment("kimi-k2.6", "h200", 8)
FORMATS = ("bf16", "fp8", "int4:g32")
FP8 = PrecisionPlan.parse("auto/fp8").decode


def winners(rows: int) -> set[str]:
    times = {}
    for name in FORMATS:
        plan = as_published(GLM.model, WeightFormat.parse(name), FP8)
        times[name] = step_time(GLM, plan, Decode(rows, 9000)).seconds
    return {name for name, time in times.items() if time <= min(times.values()) * (1 + TIE)}


def test_ranges_of_winners_cover_every_number_of_rows_and_change_exactly_at_their_borders() -> None:
    ranges = decode_ranges(GLM, FORMATS, FP8, 9000)
    assert ranges[0].first == 1
    assert ranges[-1].last is None
    for before, after in pairwise(ranges):
        assert before.last is not None
        assert after.first == before.last + 1
        assert set(before.winners) == winners(before.last)
        assert set(after.winners) == winners(after.first)
        assert before.winners != after.winners


def test_int4_wins_where_bytes_count_and_fp8_where_operations_do() -> None:
    decode = decode_ranges(GLM, FORMATS, FP8, 9000)
    prefill = prefill_ranges(GLM, FORMATS, FP8, 8192)
    for ranges in (decode, prefill):
        assert next(r for r in ranges if r.first <= 32 <= (r.last or 32)).winners == ("int4:g32",)
        assert ranges[-1].winners == ("fp8",)
        assert 500 < ranges[-1].first < 8192


def test_formats_that_cannot_be_cut_are_left_out() -> None:
    qwen = preset_deployment("qwen3-30b-a3b", "h100", 4)  # experts of width 768: 192 a rank
    found = decode_ranges(qwen, FORMATS, FP8, 1000)
    assert all("fp8" not in part.winners for part in found)


def test_costs_are_price_over_tokens() -> None:
    assert cost_per_million(KIMI, 3.0, 1e6) == pytest.approx(3.0 * 8 / 3600)


def test_memory_ends_admission_at_the_number_of_requests_that_fit() -> None:
    speeds = decode_speeds(KIMI, FP8, 9000, fitting=146)
    assert [s.concurrency for s in speeds if s.fits] == [1, 2, 4, 8, 16, 32, 64, 128, 146]
    assert [s.concurrency for s in speeds if not s.fits] == [256, 512]
    none = decode_speeds(KIMI, FP8, 9000, fitting=0)
    assert not any(s.fits for s in none)


def test_a_prompt_alone_takes_as_long_as_its_chunks() -> None:
    bf16 = PhasePlan()
    short = prefill_speed(KIMI, bf16, Prefill.of(1000), 1000)
    assert short.first_token == step_time(KIMI, bf16, Prefill.of(1000, 1000)).seconds
    long = prefill_speed(KIMI, bf16, Prefill.of(32768), 32768)
    step = step_time(KIMI, bf16, Prefill.of(32768, 8192)).seconds
    assert long.first_token == pytest.approx(4 * step)


WORK = PlannedWorkload.fixed(8192, 1000)


def test_the_best_two_phase_plan_of_glm_is_the_published_one() -> None:
    best = best_choice(GLM, WORK, pools=2)
    assert str(best.prefill.plan) == "weights=fp8,cache=bf16,head=bf16"
    assert str(best.decode.plan) == "weights=bf16,cache=fp8,experts=int4:g32"
    one = best_choice(GLM, WORK, pools=1)
    assert one.prefill.plan == one.decode.plan
    assert best.worker_seconds < 0.9 * one.worker_seconds


def test_two_pools_are_never_dearer_than_one() -> None:
    for name, tp in (("kimi-k2.6", 8), ("llama-70b", 4), ("qwen3-30b-a3b", 2)):
        deployment = preset_deployment(name, "h200", tp)
        one, two = (best_choice(deployment, WORK, pools) for pools in (1, 2))
        assert two.worker_seconds <= one.worker_seconds * (1 + TIE)


def test_no_other_pair_of_formats_is_cheaper_than_the_best() -> None:
    best = best_choice(GLM, WORK, pools=2)
    for weights in weight_candidates(GLM.device):
        for cache in ("bf16", "fp8", "fp8:token"):
            like = PrecisionPlan.parse(f"auto/{cache}").decode
            plan = as_published(GLM.model, WeightFormat.parse(weights), like)
            try:
                prefill = prefill_choice(GLM, plan, WORK)
                decode = decode_choice(GLM, plan, WORK)
            except ConfigError:
                continue
            rest = 1 / best.prefill.requests_per_second
            assert rest <= (1 + TIE) * 1 / prefill.requests_per_second + TIE
            assert best.decode.requests_per_second * (1 + 2 * TIE) >= decode.requests_per_second


def test_workers_stand_in_the_ratio_in_which_neither_waits() -> None:
    best = best_choice(GLM, WORK, pools=2)
    prefills, decodes = best.workers
    brought = prefills * best.prefill.requests_per_second
    taken = decodes * best.decode.requests_per_second
    assert brought == pytest.approx(taken, rel=0.15)
    assert best.ratio == pytest.approx(
        best.decode.requests_per_second / best.prefill.requests_per_second
    )


def test_decode_stays_within_the_limits_that_are_asked_for() -> None:
    free = decode_choice(GLM, FP8, WORK)
    assert decode_choice(GLM, FP8, WORK, most=8).concurrency == 8
    limited = decode_choice(GLM, FP8, WORK, slowest=free.seconds_per_token / 2)
    assert limited.seconds_per_token <= free.seconds_per_token / 2
    assert limited.concurrency < free.concurrency
    with pytest.raises(ConfigError, match="cannot decode this workload"):
        decode_choice(GLM, FP8, WORK, slowest=1e-9)


def test_a_request_that_does_not_fit_is_no_plan() -> None:
    huge = PlannedWorkload.fixed(10**8, 10)
    with pytest.raises(ConfigError, match="no plan serves this workload"):
        best_choice(GLM, huge, pools=2)
    with pytest.raises(ConfigError, match="prompt of 100000000 tokens does not fit"):
        prefill_choice(GLM, FP8, huge)


def test_processors_are_offered_int8_activations_and_accelerators_fp8() -> None:
    smol = preset_deployment("smollm2-135m", "epyc-9654", 1)
    assert "int8:a8" in weight_candidates(smol.device)
    assert "fp8" in weight_candidates(GLM.device)


def test_the_report_is_json_and_adds_up() -> None:
    plan = PrecisionPlan.parse(
        prefill="fp8/bf16", decode="weights=bf16,experts=int4:g32,cache=fp8:token,page=64"
    )
    report = answer(Question("glm", GLM, plan, WORK, price=3.0))
    values = json.loads(json.dumps(report.as_dict()))
    room = capacity(GLM, plan.decode)
    assert values["cache_tokens"] == room.tokens
    assert values["cache_bytes_per_token"] == room.page.page_bytes / 64
    assert values["weight_bytes_per_device"] == sum(room.weights.values())
    decode = values["phases"]["decode"]
    assert sum(decode["weight_bytes"].values()) == decode["weight_bytes_per_device"]
    assert decode["checkpoint_bytes"] / 2**30 == pytest.approx(421, rel=0.03)
    assert values["requests_that_fit"] == room.requests(9192)
    assert all(row["cost_per_million"] > 0 for row in decode["ceilings"])
    assert values["on_workload"]["two_pools"]["workers"] == [5, 8]
    assert any("routed_experts int4:g32" in line for line in values["assumptions"])


def test_published_directions_are_predicted_but_for_one_request_alone() -> None:
    ratios = {row.what: row for row in compare_published().ratios}
    missed = [what for what, row in ratios.items() if not row.agrees]
    assert missed == ["GLM-5.2, weights fp8 → int4, decode at 1"]
    assert ratios[missed[0]].note
    for row in compare_published().ratios:
        if row.agrees:
            assert abs(math.log(row.predicted / row.published)) < math.log(1.5)


def test_cache_memory_and_prefill_do_not_depend_on_the_price() -> None:
    question = Question("kimi", KIMI, PrecisionPlan.parse("auto/fp8"), WORK)
    free, priced = answer(question), answer(replace(question, price=2.0))
    assert free.cost_in is None
    assert free.cost_out is None
    assert priced.cost_in is not None
    assert priced.cost_out is not None
    assert priced.cost_in < priced.cost_out
    assert free.decode == priced.decode


def test_the_plan_that_was_asked_about_is_set_beside_the_cheapest() -> None:
    same = answer(Question("kimi", KIMI, PrecisionPlan.parse("auto/bf16"), WORK))
    assert same.asked is not None
    assert same.asked.pools == 1
    unlike = PrecisionPlan.parse(
        prefill="weights=fp8,cache=bf16,head=bf16", decode="weights=bf16,experts=int4:g32,cache=fp8"
    )
    split = answer(Question("glm", GLM, unlike, WORK))
    assert split.asked is not None
    assert split.best[1] is not None
    assert split.asked.worker_seconds == pytest.approx(split.best[1].worker_seconds, rel=0.001)
    too_long = answer(Question("kimi", KIMI, unlike_auto(), PlannedWorkload.fixed(10**8, 10)))
    assert too_long.choices == {"asked": None, "one_pool": None, "two_pools": None}


def unlike_auto() -> PrecisionPlan:
    return PrecisionPlan.parse(prefill="auto/bf16", decode="auto/fp8")


@pytest.mark.parametrize("rows", [1, 4, 32])
def test_fewer_bytes_of_experts_alone_are_never_slower_where_memory_binds(rows: int) -> None:
    """What int4 costs GLM-5.2 at one request is the rest of the model, which is bf16 then."""
    stored, experts, published = (
        step_time(GLM, PrecisionPlan.parse(f"{plan},cache=fp8:token").decode, Decode(rows, 9000))
        for plan in ("weights=fp8", "weights=fp8,experts=int4:g32", "weights=bf16,experts=int4:g32")
    )
    assert experts.weights < stored.weights
    assert published.weights > experts.weights
    (row,) = (r for r in compare_published().ratios if "decode at 1" in r.what)
    assert "the experts alone make ×1.22" in row.note


def test_the_context_that_a_measured_rate_allows_gives_that_rate_as_its_ceiling() -> None:
    (line,) = (a for a in compare_published().assumptions if "64 at once" in a)
    found = re.search(r"at most ([\d,]+) tokens", line)
    assert found is not None
    context = int(found[1].replace(",", ""))
    ceiling = 64 / step_time(KIMI, FP8, Decode(64, context)).seconds
    assert ceiling == pytest.approx(2192, rel=1e-3)
    assert context < 686_000 / 32
