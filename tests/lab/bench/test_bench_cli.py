"""`bifolio bench` and `bench compare` from the command line: a tiny model, and a mock server."""

import asyncio
import json
import time
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from bifolio.cli.main import app
from bifolio.engine.engine import Engine
from bifolio.lab.bench.pools import WARM_UP, run_load
from bifolio.lab.report.bench_part import speed_table
from bifolio.lab.report.documents import read_documents
from bifolio.lab.report.joined import joined_page
from bifolio.request import FinishReason, Output, SamplingParams
from support.mock_server import Mock, serving
from support.tiny import tiny_config, write_model

SMALL = ("--input", "12", "--output", "5", "--concurrency", "1,2", "--threads", "1")


@pytest.fixture(autouse=True)
def without_plots(monkeypatch):
    """Drawing takes most of the time of a page, and has tests of its own."""
    monkeypatch.setattr("bifolio.lab.report.joined.plots_of", lambda *_arguments: [])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("tiny"), tiny_config("llama")))


def invoke(*options, status=0):
    result = CliRunner().invoke(app, ["bench", *map(str, options)])
    assert result.exit_code == status, result.output + result.stderr
    return result


def values(*options, status=0):
    return json.loads(invoke(*options, "--json", status=status).stdout)


def test_an_engine_in_process_is_measured_and_every_token_counted(tiny, tmp_path):
    found = values("--model", tiny, *SMALL, "--requests", 6, "--repeats", 2, "--out", tmp_path)
    assert (found["kind"], found["valid"]) == ("bifolio-bench", True)
    assert [p["load"]["concurrency"] for p in found["points"]] == [1, 2]
    for run in found["runs"]:
        assert run["tokens"] == {
            "prompt_asked": 72, "prompt_real": 72, "output_asked": 30, "output_real": 30
        }  # fmt: skip
        assert run["cache"]["hit_rate"] == 0.0
        assert run["cache"]["most_running"] == run["load"]["concurrency"]
        assert run["itl_seconds"]["count"] == 6 * 4
    assert json.loads((tmp_path / "bench.json").read_text()) == found


def test_the_environment_tells_how_to_repeat_it(tiny):
    environment = values("--model", tiny, *SMALL)["environment"]
    assert environment["versions"]["bifolio"]
    assert environment["machine"]["processor"]["name"]
    assert 1e6 < environment["read_bytes_per_second"] < 1e13


def test_files_in_aiperfs_schema_hold_the_same_figures(tiny, tmp_path):
    found = values("--model", tiny, *SMALL, "--requests", 6, "--repeats", 1, "--out", tmp_path)
    (folder,) = tmp_path.glob("aiperf/*/c2-0")
    summary = json.loads((folder / "profile_export_aiperf.json").read_text())
    run = found["runs"][1]
    assert summary["schema_version"] == "1.4"
    assert summary["input_config"]["phases"][0]["concurrency"] == 2
    assert summary["request_count"] == {"unit": "requests", "avg": 6.0}
    assert summary["output_token_throughput"]["avg"] == run["output_tokens_per_second"]
    ttft = summary["time_to_first_token"]
    assert ttft["p95"] == pytest.approx(run["ttft_seconds"]["p95"] * 1e3)
    assert ttft["count"] == 6
    assert summary["output_sequence_length"]["sum"] == 30
    lines = [json.loads(s) for s in (folder / "profile_export.jsonl").read_text().splitlines()]
    assert len(lines) == 6
    for line in lines:
        assert line["metrics"]["output_sequence_length"] == {"value": 5, "unit": "tokens"}
        assert line["error"] is None
        assert line["metadata"]["request_end_ns"] > line["metadata"]["request_start_ns"]


@pytest.mark.parametrize(
    ("shares", "least"),
    # 48 of 60 tokens are whole pages of 16; of three turns of 60 the cache has the earlier ones.
    [(("--shared-prefix", 48, "--input", 12), 0.5), (("--turns", 3, "--input", 60), 0.4)],
)
def test_what_prompts_share_on_purpose_comes_from_the_cache(tiny, shares, least):
    options = ("--model", tiny, "--output", 5, "--concurrency", 1, "--requests", 6, "--threads", 1)
    found = values(*options, *shares, "--repeats", 1)
    assert found["valid"]
    assert found["runs"][0]["cache"]["hit_rate"] > least


def test_half_the_bytes_of_a_token_hold_twice_the_tokens_and_admit_twice_the_requests(tiny):
    found = values(
        *("compare", "bf16/bf16", "bf16/fp8", "--model", tiny, "--cache-memory", "512KiB"),
        *("--input", 60, "--output", 20, "--concurrency", 40, "--requests", 40),
        *("--repeats", 1, "--alone", 0, "--threads", 1),
    )
    tokens = [target["cache_tokens"] for target in found["targets"].values()]
    assert 1.8 < tokens[1] / tokens[0] <= 2.0
    ends = [sweep["admission_ends_at"] for sweep in found["sweeps"].values()]
    assert 1.7 < ends[1] / ends[0] <= 2.3
    assert all(sweep["ended_by_memory"] for sweep in found["sweeps"].values())


def test_one_prompt_alone_is_as_long_as_the_smallest_cache_allows(tiny):
    found = values(
        *("compare", "bf16/bf16", "bf16/fp8", "--model", tiny, "--cache-memory", "64KiB"),
        *("--input", 12, "--output", 3, "--concurrency", 1, "--repeats", 1, "--threads", 1),
    )
    assert found["valid"]
    smallest = min(target["max_model_len"] for target in found["targets"].values())
    assert {a["prompt_tokens"] for a in found["alone"].values()} == {smallest - 65}


def test_comparisons_pair_the_same_prompts(tiny):
    found = values(
        "compare", "bf16/bf16", "int8/bf16", "--model", tiny, *SMALL, "--alone", 40, "--repeats", 2
    )
    assert [c["part"] for c in found["comparisons"]] == ["", "", "alone"]
    for comparison in found["comparisons"]:
        ratio = comparison["ratios"]["output_tokens_per_second"]
        assert ratio["low"] <= ratio["ratio"] <= ratio["high"]
        cost = comparison["ratios"]["cost_per_token"]
        assert cost["ratio"] == pytest.approx(1 / ratio["ratio"])
    runs = found["runs"]
    seeds = {
        (r["target"], r["part"], r["load"]["concurrency"], r["repeat"]): r["seed"] for r in runs
    }
    for (_, *rest), seed in seeds.items():
        assert seeds["bf16/bf16", *rest] == seed
    order = [run["target"] for run in runs]
    assert order[:2] == ["bf16/bf16", "int8/bf16"]
    assert order[6:8] == ["int8/bf16", "bf16/bf16"]
    assert set(found["alone"]) == {"bf16/bf16", "int8/bf16"}


def test_a_server_is_measured_by_its_address(tmp_path):
    with serving(Mock(chunks=(1, 3, 0, 7))) as url:
        found = values("--url", url, *SMALL, "--requests", 4, "--out", tmp_path)
    assert found["targets"][""]["cache_tokens"] == 1600
    assert all(run["tokens"]["output_real"] == 20 for run in found["runs"])


def test_an_invalid_run_ends_with_status_1_and_says_why(tmp_path):
    with serving(Mock(fail_every=5)) as url:
        result = invoke("--url", url, *SMALL, "--requests", 20, "--out", tmp_path, status=1)
    assert "INVALID" in result.stdout
    assert "requests failed" in result.stdout
    assert json.loads((tmp_path / "bench.json").read_text())["valid"] is False
    (path,) = tmp_path.glob("aiperf/*/c1-0/profile_export.jsonl")
    lines = path.read_text().splitlines()
    errors = [json.loads(line)["error"] for line in lines]
    assert {"code": 400, "type": "refused", "message": "I do not like this one"} in errors


def short(*options, status=1, **mock):
    with serving(Mock(more=(-105,), finish="stop", **mock)) as url:
        return invoke("--url", url, "--input", 12, "--output", 120, *options, status=status)


def test_answers_cut_short_have_no_price(tmp_path):
    """Ten requests of 128 tokens, of which 16 come."""
    result = short("--requests", 10, "--concurrency", 2, "--out", tmp_path)
    assert "INVALID: c2: asked for 1,200 output tokens, got 150" in result.stdout
    bench = json.loads((tmp_path / "bench.json").read_text())
    (point,) = bench["points"]
    assert (bench["valid"], point["figures"]["cost_per_million_output_tokens"]) == (False, None)
    assert bench["sweeps"][""]["peak_concurrency"] is None
    page = joined_page(read_documents(tmp_path))
    assert page.alarms == bench["invalid"]
    assert [row[-1] for row in speed_table(bench).rows] == ["–"]
    assert not any("cost" in tile.what for tile in page.tiles)
    (path,) = tmp_path.glob("aiperf/*/c2-0/profile_export_aiperf.json")
    summary = json.loads(path.read_text())
    assert (summary["is_complete"], summary["incomplete_reason"]) == (
        False,
        bench["invalid"][0][4:],
    )


def test_a_user_may_accept_answers_of_other_lengths():
    result = short("--requests", 4, "--concurrency", 1, "--max-length-error", 90, status=0)
    assert "rates count what came" in " ".join(result.stdout.split())


def test_an_engine_in_process_that_ends_answers_early_is_invalid_too(tiny, monkeypatch):
    def halved(max_tokens, **options):
        return SamplingParams(max_tokens=max_tokens // 2, **options)

    monkeypatch.setattr("bifolio.lab.bench.in_process.SamplingParams", halved)
    found = values("--model", tiny, *SMALL, "--repeats", 1, status=1)
    assert "limits answers or ran out of context" in found["invalid"][0]
    assert [p["figures"]["cost_per_million_output_tokens"] for p in found["points"]] == [None] * 2


def test_a_plan_whose_answers_are_cut_short_is_compared_with_nothing():
    with serving(Mock()) as whole, serving(Mock(more=(-3,), finish="stop")) as cut:
        options = ("--input", 32, "--output", 6, "--concurrency", 2, "--repeats", 1)
        found = values("compare", whole, cut, *options, "--alone", 40, status=1)
    assert [bool(comparison["refused"]) for comparison in found["comparisons"]] == [True, True]
    assert all(set(c["ratios"].values()) == {None} for c in found["comparisons"])
    assert found["peak_ratios"] == {cut: None}
    assert found["alone"][whole]["decode_tokens_per_second"]
    assert found["alone"][cut]["decode_tokens_per_second"] is None


def test_pools_that_end_answers_early_have_no_figures():
    class Engine:
        hello = SimpleNamespace(vocab=300)

        async def generate(self, request):
            tokens = [1] * (request.sampling.max_tokens - 1)
            yield Output(id=request.id, tokens=tokens, finish=FinishReason.LENGTH)

    with pytest.raises(RuntimeError, match="has 7 tokens"):
        asyncio.run(run_load(Engine(), WARM_UP, 0))


def test_plans_with_different_hit_rates_are_not_compared():
    with serving(Mock()) as cold, serving(Mock(hit_share=0.5)) as warm:
        options = ("--input", 32, "--output", 4, "--concurrency", 2, "--alone", 0)
        found = values(
            "compare", cold, warm, *options, "--shared-prefix", 16, "--repeats", 1, status=0
        )
    (comparison,) = found["comparisons"]
    assert "not the same work" in comparison["refused"]
    assert comparison["ratios"]["output_tokens_per_second"] is None


def test_an_automatic_sweep_ends_where_more_brings_nothing(tiny, monkeypatch):
    """On a clock by which each step of the engine takes 10 ms, so up to the end more is better."""
    now, step = 0.0, Engine.step

    def one_step(engine):
        nonlocal now
        now += 0.01
        return step(engine)

    clock = SimpleNamespace(perf_counter=lambda: now, time_ns=time.time_ns)
    monkeypatch.setattr(Engine, "step", one_step)
    monkeypatch.setattr("bifolio.lab.bench.in_process.time", clock)
    found = values(
        *("--model", tiny, "--cache-memory", "64KiB", "--input", 40, "--output", 8),
        *("--concurrency", "auto", "--repeats", 1, "--threads", 1),
    )
    steps = [point["load"]["concurrency"] for point in found["points"]]
    assert steps == [2**i for i in range(len(steps))]
    sweep = found["sweeps"][""]
    assert sweep["peak_concurrency"] in steps
    # At most two steps beyond the end of admission.
    assert sweep["admission_ends_at"] <= steps[-1] <= 4 * sweep["admission_ends_at"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--concurrency", "0"), "above 0"),
        (("--concurrency", ""), "no list of numbers"),
        (("--rate", "nan"), "above 0 and finite"),
        (("--rate", "1,inf"), "above 0 and finite"),
        (("--url", "127.0.0.1:8000"), "invalid --url"),
        (("--out", __file__), "is no folder"),
        (("--markdown", "no-such-folder/page.md"), "there is no folder"),
        (("--concurrency", "x"), "no list of numbers"),
        (("--concurrency", "1", "--rate", "2"), "say one"),
        (("--url", "ftp://x"), "invalid --url"),
        (("--url", "http://x", "--server"), "say one of them"),
        (("--trace", "x.csv", "--turns", "2"), "brings its own prompts"),
        (("compare", "bf16/bf16"), "at least two"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(options, words, tiny):
    result = CliRunner().invoke(
        app, ["bench", *options, *(() if "--url" in options else ("--model", tiny))]
    )
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


def test_keys_are_not_recorded(monkeypatch):
    from bifolio.lab.bench import environment

    monkeypatch.setattr("sys.argv", ["bifolio", "bench", "--api-key", "secret", "--api-key=secret"])
    assert "secret" not in environment.describe_environment({}, probe=False).command
