"""Result files: what a broken plan leaves behind can be written, too."""

from __future__ import annotations

import json
import math
from pathlib import Path

from bifolio.lab.eval.distance import Distance
from bifolio.lab.eval.eval_results import document, write

SIDE = {"plan": "bf16/bf16", "resolved": "bf16/bf16", "kernels": "reference", "model_digest": "a"}


def test_numbers_that_json_does_not_know_are_null(tmp_path: Path) -> None:
    broken = Distance(3, math.nan, math.inf, 0.5, 2.0, -math.inf)
    found = document("distance", "model", SIDE, SIDE, {}, distance=[broken])
    text = write(tmp_path, found).read_text()
    (distance,) = json.loads(text, parse_constant=lambda name: name)["distance"]
    assert distance == {
        "positions": 3,
        "kl": None,
        "kl_p99": None,
        "top1": 0.5,
        "reference_perplexity": 2.0,
        "candidate_perplexity": None,
    }
