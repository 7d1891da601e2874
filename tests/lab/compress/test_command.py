"""`bifolio compress` as a command: with a text, it says how far the result is from its source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bifolio.checkpoint.builtin import BUILTIN, builtin_path
from bifolio.cli.main import app
from bifolio.lab.compress.calibration_texts import LEAST_TOKENS
from support.tiny import tiny_config, write_model


def test_texts_of_unequal_lengths_are_judged_alike(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", tiny_config("llama"))
    lines = [json.dumps({"tokens": [3 + i % 200] * (16 + 3 * i)}) for i in range(48)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    command = ["compress", str(source), str(tmp_path / "small"), "--weights", "int4:g32", "--json"]
    result = CliRunner().invoke(app, [*command, "--calibration", str(tmp_path / "text.jsonl")])
    assert result.exit_code == 0, result.output
    distance = json.loads(result.stdout)["distance"]
    assert distance["positions"] > 0 and distance["kl"] > 0


@pytest.mark.parametrize("command", ["compress", "calibrate"])
def test_logs_are_one_json_object_a_line_and_at_most_one_a_second(
    command: str, tmp_path: Path
) -> None:
    source = write_model(tmp_path / "source", tiny_config("llama"))
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(json.dumps({"tokens": [5, 6, 7] * 20}) for _ in range(16)))
    rest = {
        "compress": [str(tmp_path / "small"), "--calibration", str(text)],
        "calibrate": ["--data", str(text)],
    }
    result = CliRunner().invoke(app, [command, str(source), *rest[command]])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    assert {line["event"] for line in lines} == {"progress"}
    stages = [(line["stage"], line["timestamp"][:19]) for line in lines]
    assert all(stages.count(stage) <= 2 for stage in stages)  # the last news may follow at once


@pytest.mark.parametrize("source", ["smollm2-135m", "model.gguf"])
def test_a_gguf_file_is_refused_dry_or_not(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIFOLIO_HOME", str(tmp_path))
    path = builtin_path(source) if source in BUILTIN else tmp_path / source
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"GGUF")
    source = source if source in BUILTIN else str(path)
    command = ["compress", source, str(tmp_path / "small")]
    dry, wet = (CliRunner().invoke(app, [*command, *more]) for more in (["--dry-run"], []))
    assert (dry.exit_code, wet.exit_code) == (2, 2)
    assert dry.stdout == ""
    assert dry.stderr == wet.stderr
    assert f"{source} is a GGUF file" in dry.stderr


@pytest.mark.parametrize(
    ("command", "option"), [("compress", "--calibration-tokens"), ("calibrate", "--tokens")]
)
def test_the_fewest_tokens_of_an_option_are_those_of_a_text(command: str, option: str) -> None:
    asked = [command, "source", "--data" if command == "calibrate" else "--calibration", "text"]
    result = CliRunner().invoke(app, [*asked, option, str(LEAST_TOKENS - 1)])
    assert result.exit_code == 2
    assert f"equal to {LEAST_TOKENS}" in " ".join(result.stderr.replace("│", " ").split())
    help_text = CliRunner().invoke(app, [command, "--help"]).stdout
    assert f"{LEAST_TOKENS:,} in one text" in " ".join(help_text.replace("│", " ").split())
