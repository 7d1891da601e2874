"""A report joins what is there, names what is missing, and its figures are those of the results."""

import json
import re

import pytest
from typer.testing import CliRunner

from bifolio.cli.main import app
from bifolio.errors import ConfigError
from bifolio.lab.report.bench_part import speed_table
from bifolio.lab.report.documents import read_documents
from bifolio.lab.report.joined import joined_page
from bifolio.lab.report.published_part import pairs
from bifolio.lab.report.render import to_html, to_markdown
from support.tiny import tiny_config, write_model

TASK = {
    "task": "copy-<b>", "language": "en", "verdict": "equivalent", "items": 64, "margin": 0.05,
    "reference": {"accuracy": 0.5}, "candidate": {"accuracy": 0.484375}, "difference": -0.015625,
    "bootstrap": [-0.046875, 0.015625],
}  # fmt: skip


def evaluation(**parts):
    sides = {"reference": {"plan": "bf16/bf16"}, "candidate": {"plan": "bf16/fp8"}}
    model = {"model": {"name": "tiny", "digest": "abc"}, "command": ["bifolio", "eval", "tasks"]}
    return {"schema": "bifolio.eval/1", "kind": "tasks", **sides, **model} | parts


def run(*options):
    result = CliRunner().invoke(app, list(map(str, options)))
    assert result.exit_code == 0, result.output + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A folder with a plan, a comparison and an evaluation of a tiny model."""
    folder = tmp_path_factory.mktemp("results")
    tiny = write_model(tmp_path_factory.mktemp("tiny"), tiny_config("llama"))
    lengths = ("--input", 60, "--output", 8)
    run("plan", "-m", tiny, "--plan", "bf16/fp8", "-d", "ryzen-7950x", *lengths, "--out", folder)
    run(
        *("bench", "compare", "bf16/bf16", "bf16/fp8", "int4:g32/bf16", "--model", tiny, *lengths),
        *("--cache-memory", "256KiB", "--concurrency", "1,16", "--requests", 16, "--repeats", 2),
        *("--alone", 100, "--threads", 1, "--out", folder, "--price-per-hour", 2),
    )
    (folder / "eval-1.json").write_text(json.dumps(evaluation(tasks=[TASK])))
    return folder


@pytest.fixture
def without_plots(monkeypatch):
    """Drawing takes most of the time of a page."""
    monkeypatch.setattr("bifolio.lab.report.joined.plots_of", lambda *_arguments: [])


def test_the_page_stands_for_itself(results):
    run("report", results)
    page = (results / "report.html").read_text()
    assert not re.search(r"<script|<link|@import|url\((?!#)|(?:src|href)=\"(?!#)", page)
    assert page.count("<svg") == 4
    assert "var(--line-1)" in page
    assert "#0404" not in page  # every stand-in became a colour of the page
    assert "prefers-color-scheme: dark" in page
    assert (results / "plots" / "throughput-dark.png").read_bytes()[1:4] == b"PNG"


def test_every_figure_of_the_table_is_the_results_own(results):
    bench = json.loads((results / "bench.json").read_text())
    table = speed_table(bench)
    assert len(table.rows) == 3 * 2
    for row, point in zip(table.rows, sorted_points(bench), strict=True):
        rate = point["figures"]["output_tokens_per_second"]["median"]
        assert (row[0], row[1]) == (point["target"], str(point["load"]["concurrency"]))
        assert row[2].split()[0] == f"{rate:,.0f}"
        cost = point["figures"]["cost_per_million_output_tokens"]
        assert float(row[-1].replace(",", "")) == pytest.approx(cost["median"], rel=0.01)
        assert cost["min"] <= 2 / 3600 / rate * 1e6 <= cost["max"]
    assert len(table.marked) == 3  # the peak of each plan


def sorted_points(bench):
    return [p for name in bench["targets"] for p in bench["points"]
            if p["target"] == name and p["part"] == ""]  # fmt: skip


@pytest.mark.usefixtures("without_plots")
def test_the_published_rows_meet_their_like_only(results):
    run("report", results)
    bench = json.loads((results / "bench.json").read_text())
    caches, weights = pairs([bench])
    assert [pair.name for pair in caches] == ["bf16/bf16 → bf16/fp8"]
    assert [pair.name for pair in weights] == ["bf16/bf16 → int4:g32/bf16"]
    assert 1.8 < caches[0].tokens < 2.1
    rows = json.loads((results / "report.json").read_text())["published"]["rows"]
    assert rows[0][0] == "cache bf16 → fp8, tokens that fit"
    assert rows[0][3] == f"×{caches[0].tokens:.2f}"
    assert rows[3][3] == f"×{1 / caches[0].peak:.2f}"


def test_a_plan_whose_phases_differ_meets_no_published_row():
    assert pairs([{"targets": {"bf16/bf16": {}, "bf16/bf16->int4:g32/bf16": {}}}]) == ([], [])


@pytest.mark.usefixtures("without_plots")
def test_what_is_measured_stands_beside_the_ceiling_of_the_same_plan_and_lengths(results):
    page = joined_page(read_documents(results))
    (section,) = [s for s in page.sections if s.title == "The plan"]
    (table,) = [t for t in section.tables if t.caption.startswith("Decode of")]
    shares = {row[0]: row[-1] for row in table.rows}
    assert shares["1"].endswith("%")
    assert shares["2"] == "–"


@pytest.mark.usefixtures("without_plots")
def test_what_is_missing_is_named_and_no_error(results, tmp_path):
    (tmp_path / "bench.json").write_text((results / "bench.json").read_text())
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text("[1]")
    told = run("report", tmp_path)
    assert "no plan" in told
    assert "no evaluation" in told
    assert "broken.json cannot be read" in told
    assert "other.json" not in told


@pytest.mark.usefixtures("without_plots")
@pytest.mark.parametrize(
    "damage", [{"assumptions": None}, {"device": "h200"}, {"weight_bytes_per_device": "many"}]
)
def test_a_damaged_result_is_named_and_left_out(results, tmp_path, damage):
    (tmp_path / "bench.json").write_text((results / "bench.json").read_text())
    [plan] = results.glob("plan-*.json")
    (tmp_path / "plan.json").write_text(json.dumps(json.loads(plan.read_text()) | damage))
    said = run("report", tmp_path)
    assert "note: plan.json is not as bifolio wrote it (" in said
    assert "no plan" in said


def test_a_folder_without_results_is_refused_with_the_commands_that_make_some(tmp_path):
    with pytest.raises(ConfigError, match="bifolio bench compare"):
        read_documents(tmp_path)
    with pytest.raises(ConfigError, match="is no folder"):
        read_documents(tmp_path / "none")


@pytest.mark.usefixtures("without_plots")
def test_texts_from_results_are_not_taken_for_html(results):
    page = to_html(joined_page(read_documents(results)))
    assert "copy-&lt;b&gt;" in page
    assert "copy-<b>" not in page


@pytest.mark.usefixtures("without_plots")
def test_evaluations_show_verdict_difference_and_interval(results, tmp_path):
    gate = {"passed": False, "failures": [{"slice": "kv", "verdict": "no signal", "reason": "r"}]}
    text = {
        "text": "story", "context": 0, "distance": {"positions": 100, "reference_perplexity": 9.5},
        "kl": {"mean": 0.01234}, "top1": {"mean": 0.941}, "noise": {"kl": {"mean": 0.00001}},
    }  # fmt: skip
    document = evaluation(tasks=[TASK, {"task": "x"}], gate=gate, distance=[text])
    (tmp_path / "eval-a.json").write_text(json.dumps(document))
    page = joined_page(read_documents(tmp_path))
    words = to_markdown(page)
    assert "| copy-<b> | equivalent | 64 | 50.0% | 48.4% | -1.6 | -4.7 to +1.6 | 5.0% |" in words
    assert "| story | all | 100 | 0.01234 | 0.00001 | 94.1% | 9.5 | – |" in words
    assert "| kv | no signal | r |" in words
    assert [(tile.figure, tile.tone) for tile in page.tiles] == [("failed", "bad")]


@pytest.mark.usefixtures("without_plots")
def test_markdown_has_the_tables(results, tmp_path):
    run("report", results, "--markdown", tmp_path / "page.md", "--out", tmp_path / "page.html")
    words = (tmp_path / "page.md").read_text()
    assert "## Speed and cost, measured here" in words
    assert "| bf16/fp8 |" in words


def test_an_invalid_benchmark_stands_out(results, tmp_path):
    bench = json.loads((results / "bench.json").read_text())
    bench["invalid"] = ["c1: 3 of 4 requests failed"]
    for point in bench["points"]:
        point["invalid"] = bench["invalid"]
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    page = joined_page(read_documents(tmp_path))
    assert "3 of 4 requests failed" in to_html(page)
    assert 0 in speed_table(bench).struck
