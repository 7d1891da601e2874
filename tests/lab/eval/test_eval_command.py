"""`bifolio eval` from the command line to its files, on a small random model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bifolio.cli.main import app
from support.tiny import tiny_config, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, tiny_config(max_position_embeddings=4096))
    return folder


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("items") / "mine.jsonl"
    rows = [
        {"prompt": f"the river {i}", "expected": "runs to the sea", "length": i % 2}
        for i in range(8)
    ]
    rows += [
        {"task": "pick", "prompt": f"{i}", "expected": "north", "choices": ["north", "sea"]}
        for i in range(8)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*arguments: Any, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["eval", *map(str, arguments)])
    assert result.exit_code == status, result.output + result.stderr
    return result.stdout


def read(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    (path,) = folder.glob("*.json")
    found = json.loads(path.read_text())
    beside = folder / found.get("items_file", "none")
    lines = beside.read_text().splitlines() if beside.exists() else []
    return found, [json.loads(line) for line in lines]


def test_tasks_write_what_it_takes_to_repeat_them(model: Path, items: Path, tmp_path: Path) -> None:
    text = run(
        "tasks", "-m", model, "--tasks", items, "--candidate", "int8/fp8:token", "--out", tmp_path
    )
    assert "mine: no signal" in text
    found, lines = read(tmp_path)
    assert (found["schema"], found["kind"]) == ("bifolio.eval/1", "tasks")
    assert found["candidate"]["plan"] == "int8/fp8:token"
    assert "int8/fp8:token" in found["candidate"]["resolved"]
    assert found["model"]["digest"] == found["candidate"]["model_digest"]
    assert set(found["versions"]) >= {"bifolio", "torch", "python"}
    mine, pick = found["tasks"]
    assert (mine["task"], pick["task"]) == ("mine", "pick")
    assert mine["reference"]["prompts_digest"] == mine["candidate"]["prompts_digest"]
    assert (mine["items"], mine["pairs"]["n"], pick["chance"]) == (8, 8, 0.5)
    assert [g["items"] for g in mine["groups"]] == [4, 4]
    assert mine["likelihoods"]["better"] + mine["likelihoods"]["worse"] == 8
    assert len(lines) == 16
    assert all(line["prompt_ids"] and "logprob" in line["reference"] for line in lines)
    assert all(len(line["candidate"]["scores"]) == 2 for line in lines if line["task"] == "pick")


def test_a_plan_beside_itself_differs_in_no_bit(model: Path, items: Path, tmp_path: Path) -> None:
    run("tasks", "-m", model, "--tasks", items, "--candidate", "bf16/bf16", "--out", tmp_path)
    found, lines = read(tmp_path)
    assert all(line["reference"] == line["candidate"] for line in lines)
    assert [task["likelihoods"]["p"] for task in found["tasks"]] == [1.0, 1.0]


def test_distance_has_every_text_context_and_position(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "a_text_of_a_long_name.txt"
    text.write_text("the river runs to the sea and the capital is in the north " * 20)
    options = ("--context", 16, "--context", 40, "--scored", 8, "--windows", 6)
    shown = run(
        "distance", text, "-m", model, "--candidate", "int8/bf16", *options, "--out", tmp_path / "o"
    )
    found, _ = read(tmp_path / "o")
    assert [(row["text"], row["context"]) for row in found["distance"]] == [
        ("a_text_of_a_long_name.txt", 16),
        ("a_text_of_a_long_name.txt", 40),
        ("a_text_of_a_long_name.txt", 0),
    ]
    whole = found["distance"][-1]
    assert (whole["windows"], whole["distance"]["positions"]) == (12, 96)
    assert len(whole["kl_by_position"]) == 8
    assert sum(whole["kl_by_position"]) / 8 == pytest.approx(whole["distance"]["kl"])
    assert found["floor"]["kernels"] == "reference"
    assert whole["noise"]["p"] == pytest.approx(2 * 0.5**12)
    assert whole["noise"]["floor"]["kl"] < whole["distance"]["kl"] / 10
    assert f" {whole['distance']['kl']:.5f} " in shown, "names give way on 80 columns, not figures"
    assert "…" not in shown


def test_the_built_in_stories_are_scored_in_both_languages(model: Path) -> None:
    options = ("--context", 8, "--scored", 4, "--windows", 1, "--floor", "fp32", "--json")
    (found,) = json.loads(run("distance", "-m", model, "--candidate", "int8/bf16", *options))
    assert [row["language"] for row in found["distance"]] == ["en", "sk", "en", "sk", ""]
    assert found["floor"]["plan"] == "fp32/fp32"


def test_a_gate_without_signal_exits_with_one_and_names_the_slice(
    model: Path, items: Path, tmp_path: Path
) -> None:
    options = ("--tasks", items, "--task", "mine", "--margin", 0.05, "--out", tmp_path)
    text = run("gate", "-m", model, "--candidate", "bf16/bf16", *options, status=1)
    assert "FAIL  mine: no signal" in text
    found, _ = read(tmp_path)
    assert found["gate"]["passed"] is False
    assert [one["slice"] for one in found["gate"]["failures"]] == ["mine"]


def test_limits_on_the_distance_are_slices_of_the_gate(model: Path, items: Path) -> None:
    options = ("--tasks", items, "--margin", 0.05, "--max-kl", 0.0, "--min-top1", 0.1, "--json")
    (found,) = json.loads(run("gate", "-m", model, "--candidate", "int8/bf16", *options, status=1))
    verdicts = {one["slice"]: one["verdict"] for one in found["gate"]["slices"]}
    assert verdicts["KL, story en"] == "shown different"
    assert verdicts["same top token, all"] == "equivalent"


def test_choices_that_all_score_the_same_measure_nothing_and_are_refused(
    model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "same.jsonl"
    row = {"prompt": "the river", "expected": "sea", "choices": ["sea", "sea"]}
    path.write_text(json.dumps(row) + "\n")
    result = CliRunner().invoke(
        app, ["eval", "tasks", "-m", str(model), "--tasks", str(path), "--candidate", "int8/bf16"]
    )
    assert result.exit_code == 2
    assert "all choices score" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tasks", "--candidate", "int9/bf16"), "unknown weight format"),
        (("tasks", "--candidate", "bf16", "--task", "nothing"), "no task 'nothing'"),
        (("distance", "--candidate", "bf16", "no-such-file"), "cannot read no-such-file"),
        (("distance", "--candidate", "bf16", "--context", "5000"), "more than the 4096 positions"),
        (("tasks", "--candidate", "bf16", "--data", "/nowhere"), "holds none of the sets"),
    ],
)
def test_what_cannot_work_is_one_line(
    model: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = CliRunner().invoke(app, ["eval", arguments[0], "-m", str(model), *arguments[1:]])
    assert result.exit_code == 2
    assert message in result.stderr


def test_two_phases_with_different_weights_are_run_as_such(
    model: Path, items: Path, tmp_path: Path
) -> None:
    plan = "bf16/bf16->int8/bf16"
    run("tasks", "-m", model, "--tasks", items, "--candidate", plan, "--out", tmp_path)
    found, lines = read(tmp_path)
    assert found["candidate"]["resolved"].startswith("bf16/bf16 → int8/bf16")
    differ = [line["reference"]["logprob"] != line["candidate"]["logprob"] for line in lines]
    assert any(differ)
