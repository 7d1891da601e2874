"""A few steps of training give a checkpoint that bifolio and `transformers` read alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, DeepseekV3ForCausalLM

from bifolio.evals.subject import Setup, Subject, Texts

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of 256 tokens, each scored, in the folder of the run."""
    out = tmp_path_factory.mktemp("run")
    options = ["--steps", "2", "--batch", "256", "--processes", "1", "--score-minutes", "0"]
    questions = ["--questions", "1", "--final-questions", "1", "--lengths", "128"]
    subprocess.run(
        [sys.executable, TOOLS / "train_tiny.py", "--out", out, *options, *questions],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
    )
    return out


def test_training_scores_itself_and_moves_the_correction_biases(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["loss"] > 0 for line in lines)
    assert {"copy@128", "kv@128", "sums", "words", "tools"} <= lines[0].keys()
    model = DeepseekV3ForCausalLM.from_pretrained(run / "checkpoint")
    for layer in model.model.layers[1:]:
        bias = layer.mlp.gate.e_score_correction_bias
        assert bias.dtype == torch.float32
        assert bias.min() < 0 < bias.max()


def test_the_checkpoint_says_how_it_was_made(run: Path) -> None:
    found = json.loads((run / "checkpoint" / "scores.json").read_text())
    last = json.loads((run / "log.jsonl").read_text().splitlines()[-1])
    assert (found["step"], found["tokens"]) == (2, last["tokens"])
    assert found["seed"] == 1
    assert 4e6 < found["parameters"] < 6e6
    assert {"python", "torch", "transformers"} == found["versions"].keys()
    assert (run / "checkpoint" / "model.safetensors").stat().st_size < 16_000_000


def test_bifolio_and_transformers_read_the_checkpoint_alike(run: Path) -> None:
    folder = run / "checkpoint"
    texts = Texts(str(folder))
    prompt = "[a:x7Kq] Žltý kôň.\ncopy a"
    ids = texts.prompt_ids(prompt, chat=True)
    judge = AutoTokenizer.from_pretrained(folder)
    message = [{"role": "user", "content": prompt}]
    assert ids == judge.apply_chat_template(message, add_generation_prompt=True)["input_ids"]
    assert ids == [257, 258, *prompt.encode(), 259]
    model = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([[*ids, 65]])).logits[0, -2:]
    forced = Subject(Setup(str(folder), "fp32/fp32", threads=1), texts, 64).forced()
    got = torch.cat(list(forced.logits(ids, [65, 66])))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
