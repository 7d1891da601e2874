"""Lengths of requests, given or from traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from bifolio.errors import ConfigError
from bifolio.lab.plan.planned_workload import PlannedWorkload, read_trace


def test_azure_traces_are_read_in_their_own_and_in_plain_column_names(tmp_path: Path) -> None:
    first = tmp_path / "azure.csv"
    first.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:01:16.0,100,10\n"
        "2023-11-16 18:01:17.0,100,10\n2023-11-16 18:01:18.0,300,0\n"
    )
    second = tmp_path / "copy.csv"
    second.write_text("arrival_s,context_tokens,generated_tokens\n0,100,10\n1,100,10\n2,300,0\n")
    assert read_trace(first) == read_trace(second)
    work = read_trace(first)
    assert work.lengths == (((100, 10), 2), ((300, 1), 1))
    assert work.requests == 3
    assert work.mean_prompt == pytest.approx(500 / 3)
    assert work.longest == 301
    assert work.repeated is None


def test_mooncake_traces_tell_which_part_of_the_prompts_repeats(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 1, "input_length": 1000, "output_length": 5, "hash_ids": [1, 3]},
        {"timestamp": 2, "input_length": 600, "output_length": 5, "hash_ids": [1, 3]},
    ]
    plain, packed = tmp_path / "m.jsonl", tmp_path / "m.jsonl.gz"
    plain.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(plain) == read_trace(packed)
    assert read_trace(plain).repeated == pytest.approx((512 + 600) / 2624)


def test_means_over_decode_steps_weigh_requests_by_their_output() -> None:
    work = PlannedWorkload((((100, 10), 1), ((1000, 30), 1)))
    assert work.context == pytest.approx((105 * 10 + 1015 * 30) / 40)
    assert work.reserved == pytest.approx((110 * 10 + 1030 * 30) / 40)
    assert work.mean_output == 20
    assert work.beyond(500) == 1
    assert PlannedWorkload.fixed(8192, 1000).reserved == 9192


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("t.csv", "a,b\n1,2\n", "columns a, b; wanted: ContextTokens"),
        ("t.csv", "ContextTokens,GeneratedTokens\n1,x\n", "line 2 .* are not token counts"),
        ("t.csv", "ContextTokens,GeneratedTokens\n0,1\n", "line 2 .* 0 and 1 tokens"),
        ("t.csv", "ContextTokens,GeneratedTokens\n", "no requests"),
        ("t.jsonl", '{"input_length": 1}\n', "line 1 .*input_length and output_length"),
        ("t.jsonl", '{"input_length": 1, "output_length": 1}\n[1]\n', "line 2"),
        ("t.jsonl", '{"input_length": 1, "output_length": 1, "hash_ids": 7}\n', "line 1"),
        ("t.jsonl", "", "no requests"),
        ("t.jsonl.gz", "not gzip", "cannot read the trace"),
    ],
)
def test_broken_traces_are_refused_with_file_and_line(
    tmp_path: Path, name: str, text: str, error: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=error):
        read_trace(path)


def test_a_missing_trace_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot read the trace nowhere\.csv"):
        read_trace(Path("nowhere.csv"))
