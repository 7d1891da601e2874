"""Does the evaluation see what it should, and nothing else? Faults, and a plan beside itself.

    python tools/eval_faults.py --model smollm2-135m

Each fault of `testing.plan_faults` is put into a candidate and judged as `bifolio eval` would: the
distance on the built-in stories, and two tasks. Then the reference is judged beside itself, on the
same kernels (no bit may differ) and on the other ones (the noise there is). From that noise 100
repeats are drawn, in which the two sides are exchanged item by item at random, so that every alarm
is false. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bifolio.lab.eval.compare import QualityComparison
from bifolio.lab.eval.distance_run import DistanceRun, built_in_passages
from bifolio.lab.eval.statistics import Pairs, mcnemar, sign_test
from bifolio.lab.eval.subject import Setup, Subject, SubjectTokenizer
from bifolio.lab.eval.task_run import BuildSubject, Compared, TaskRun
from bifolio.lab.eval.tasks.selection import available, chosen
from bifolio.process.logs import configure

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.plan_faults import PlanFault, faulty

REFERENCE = "bf16/bf16"
PLANS = {
    PlanFault.CACHE_SCALE: "bf16/fp8",
    PlanFault.SWAPPED_NIBBLES: "int4:g32/bf16",
    PlanFault.ZEROED_LAYER: "bf16/bf16",
}
REPEATS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--task", action="append", help="default: copy-identifiers and kv")
    parser.add_argument("--items", type=int, default=24)
    parser.add_argument(
        "--own-items", type=int, default=64, help="of the reference beside itself: enough to pass"
    )
    parser.add_argument("--margin", type=float, default=0.05)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    configure("error")
    names = options.task or ["copy-identifiers", "kv"]

    def tasks_of(items: int) -> TaskRun:
        return TaskRun(chosen(available(items, 0, None, []), names), options.margin)

    run = tasks_of(options.items)
    texts = SubjectTokenizer(options.model)

    def setup(plan: str, kernels: str = "auto") -> Setup:
        return Setup(options.model, plan, kernels, options.threads)

    found: dict[str, Any] = {}
    for fault, plan in PLANS.items():
        started, used = time.monotonic(), time.process_time()
        ways = (Subject, faulty(fault))
        distance = distance_p(setup(REFERENCE), setup(plan), texts, ways)
        tasks = one(run, setup(REFERENCE), setup(plan), texts, ways)
        found[str(fault)] = distance | {
            "plan": plan,
            "tasks": {c.task: task_facts(c) for c in tasks.comparisons},
            "seconds": round(time.monotonic() - started),
            "cpu_seconds": round(time.process_time() - used),
        }
        say(str(fault), found[str(fault)])
    for name, kernels in (("itself", "auto"), ("itself on other kernels", "reference")):
        own = tasks_of(options.own_items) if kernels == "auto" else run
        same = one(own, setup(REFERENCE), setup(REFERENCE, kernels), texts, (Subject, Subject))
        found[name] = {c.task: task_facts(c) for c in same.comparisons} | {
            "bits_differ": any(r != c for pair in same.answers for r, c in zip(*pair, strict=True))
        }
        say(name, found[name])
        if kernels == "reference":
            found["false alarms"] = false_alarms(same)
            say("false alarms", found["false alarms"])
    print(json.dumps(found))


def distance_p(
    reference: Setup,
    candidate: Setup,
    texts: SubjectTokenizer,
    build: tuple[BuildSubject, BuildSubject],
) -> dict[str, Any]:
    """Mean KL beside the noise, and the p of the sign test over windows."""
    run = DistanceRun(built_in_passages(), contexts=(64,), scored=32, count=8)
    (found,) = run.measure(reference, [candidate], texts, build=build)
    row = found.rows[-1]
    assert row.noise is not None
    return {"kl": row.distance.kl, "noise": row.noise.floor.kl, "p": row.noise.p}


def one(
    run: TaskRun,
    reference: Setup,
    candidate: Setup,
    texts: SubjectTokenizer,
    build: tuple[BuildSubject, BuildSubject],
) -> Compared:
    (found,) = run.compare(reference, [candidate], texts, build=build)
    return found


def task_facts(one: QualityComparison) -> dict[str, Any]:
    return {
        "verdict": str(one.verdict),
        "reference": one.reference.accuracy,
        "candidate": one.candidate.accuracy,
        "mcnemar_p": one.mcnemar_p,
        "likelihood_p": one.likelihoods.p if one.likelihoods else None,
    }


def false_alarms(same: Compared) -> dict[str, Any]:
    """Alarms at p < 0.05 and p < 0.001 among repeats in which only chance tells the sides apart."""
    generator = np.random.default_rng(0)
    right = np.array([[a.correct for side in pair for a in side] for pair in same.answers])
    logprob = np.array([[a.logprob for side in pair for a in side] for pair in same.answers])
    items = right.shape[1] // 2
    alarms = {"repeats": REPEATS, "mcnemar 0.05": 0, "mcnemar 0.001": 0}
    alarms |= {"likelihood 0.05": 0, "likelihood 0.001": 0}
    for _ in range(REPEATS):
        swap = generator.random((len(same.answers), items)) < 0.5
        drawn = generator.integers(0, items, items)
        for task in range(len(same.answers)):
            r, c = right[task, :items], right[task, items:]
            sides = np.where(swap[task], c, r)[drawn], np.where(swap[task], r, c)[drawn]
            gaps = (logprob[task, items:] - logprob[task, :items]) * np.where(swap[task], -1, 1)
            p_values = {
                "mcnemar": mcnemar(Pairs.of(sides[0].tolist(), sides[1].tolist())),
                "likelihood": sign_test(int((gaps > 0).sum()), int((gaps < 0).sum())),
            }
            for name, p in p_values.items():
                alarms[f"{name} 0.05"] += p < 0.05
                alarms[f"{name} 0.001"] += p < 0.001
    return alarms | {"tasks": len(same.answers)}


def say(name: str, facts: Any) -> None:
    print(f"{name}: {facts}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
