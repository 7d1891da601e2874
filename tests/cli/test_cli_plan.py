"""`bifolio plan` from the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from bifolio.cli import plan_machine
from bifolio.cli.main import app
from bifolio.kernels.native import available
from bifolio.lab.plan.presets import PRESETS
from bifolio.machine import MachineLimits
from support.tiny import tiny_config, write_model

H200 = ("--device", "h200", "--tp", "8")
EXPERTS = "weights=bf16,experts=int4:g32,cache=fp8:token"


def run(*options: str) -> str:
    result = CliRunner().invoke(app, ["plan", *options])
    assert result.exit_code == 0, result.output + result.stderr
    return result.stdout


def refused(*options: str) -> str:
    result = CliRunner().invoke(app, ["plan", *options])
    assert result.exit_code == 2
    assert result.stdout == ""
    return result.stderr


def values(*options: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*options, "--json"))
    return found


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        (("--model", "kimi-k2.6", "--cache", "fp8"), 1_370_000),
        (("--model", "kimi-k2.6", "--cache", "bf16"), 686_000),
        (
            ("--model", "glm-5.2", "--plan", "weights=bf16,experts=int4:g32,cache=fp8:token"),
            1_180_000,
        ),
    ],
)
def test_the_published_token_counts_come_out_within_3_percent(
    options: tuple[str, ...], tokens: int
) -> None:
    found = values(*options, *H200)
    assert found["cache_tokens"] == pytest.approx(tokens, rel=0.03)
    assert found["cache_bytes_per_token"] * found["cache_tokens"] == pytest.approx(
        found["phases"]["decode"]["cache_bytes"], rel=1e-4
    )


def test_the_table_shows_tokens_assumptions_and_where_memory_ends() -> None:
    text = run("--model", "kimi-k2.6", "--cache", "fp8", *H200, "--price-per-hour", "3")
    assert "1,349,920" in text
    assert "routed_experts int4:g32; all else bf16" in text
    assert "full" in text
    assert "too many" in text
    assert "cost/M" in text
    assert "GiB 2³⁰" in text


def test_what_of_a_mixture_may_be_mapped_is_shown() -> None:
    options = ("-m", "kimi-k2.6", "-d", "epyc-9654", "--cache", "fp8")
    phase = values(*options)["phases"]["decode"]
    routed = phase["weight_bytes"]["routed_experts"]
    assert phase["weight_bytes_mappable"] == routed > 5e11
    assert phase["weight_bytes_resident"] == phase["weight_bytes_per_device"] - routed
    text = run(*options)
    assert re.search(r"of them in memory +23\.\d\d GB", text)
    assert re.search(r"may be mapped +570\.\d\d GB", text)
    dense = ("-m", "llama-70b", "-d", "epyc-9654")
    assert "mapped" not in run(*dense)
    assert values(*dense)["phases"]["decode"]["weight_bytes_mappable"] == 0


def test_two_phases_are_two_columns() -> None:
    text = run("-m", "glm-5.2", *H200, "--prefill", "fp8/bf16", "--decode", "int4:g32/fp8")
    assert re.search(r"prefill +decode\n", re.sub(r" +\n", "\n", text))
    assert "weights of prefill" in text


def test_published_figures_stand_beside_predictions() -> None:
    text = run("--published")
    assert "686,000 tokens" in text
    assert text.count("✓") == 12
    assert text.count("✗") == 1
    found = values("--published")
    assert all(row["agrees"] for row in found["capacity"])
    assert {"what", "published", "ceiling", "share"} <= set(found["speed"][0])


def test_export_prints_commands_that_can_be_pasted() -> None:
    text = run("-m", "kimi-k2.6", "--cache", "fp8", *H200, "--export", "sglang")
    command = text.splitlines()[0]
    assert command.startswith("python -m sglang.launch_server --model-path moonshotai/Kimi-K2.6")
    assert "What sglang cannot do" in text
    found = values("-m", "kimi-k2.6", "--cache", "fp8", *H200, "--export", "vllm")
    assert set(found) == {"engine", "commands", "cannot"}


def test_a_trace_gives_the_lengths(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("ContextTokens,GeneratedTokens\n1000,100\n3000,300\n")
    found = values("-m", "llama-70b", *H200, "--trace", str(trace))
    assert found["workload"]["requests"] == 2
    assert found["workload"]["mean_prompt_tokens"] == 2000
    assert found["on_workload"]["two_pools"]["workers"]


def test_a_checkpoint_folder_is_planned_from_its_configuration_and_sizes(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", tiny_config("qwen3"), dtype=torch.bfloat16)
    options = ("--device", "ryzen-7950x", "--input", "100", "--output", "20")
    found = values("--model", str(folder), *options)
    size = (folder / "model.safetensors").stat().st_size
    assert 0 < size - found["weight_bytes_per_device"] < 10_000  # the file's header
    assert any(f"{size:,} B" in line for line in found["assumptions"])
    assert (
        values("--model", str(folder / "config.json"), *options)["cache_tokens"]
        == (found["cache_tokens"])
    )


def test_memory_and_share_can_be_said() -> None:
    small = values("-m", "smollm2-135m", "-d", "epyc-9654", "--memory", "1GiB")
    assert small["device"]["usable_bytes"] == 2**30 * 82 // 100
    more = values(
        "-m", "smollm2-135m", "-d", "epyc-9654", "--memory", "1GiB", "--memory-share", "90"
    )
    assert more["cache_tokens"] > small["cache_tokens"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((), "say what to plan for"),
        (("-m", "nothing"), f"one of {', '.join(PRESETS)}"),
        (("-m", "llama-70b", "-d", "tpu"), "devices: h100, h200"),
        (("-m", "llama-70b", "-d", "h100"), "use more devices (--tp)"),
        (("-m", "llama-70b", *H200, "--plan", "int3/bf16"), "unknown weight format"),
        (("-m", "llama-70b", *H200, "--cache", "fp8", "--plan", "fp8"), "--cache stands alone"),
        (("-m", "llama-70b", *H200, "--input", "200000"), "context of llama-70b is 131,072"),
        (("-m", "qwen3-30b-a3b", "-d", "h100", "--tp", "3"), "cannot be cut in 3"),
        (("-m", "llama-70b", *H200, "--trace", "none.csv"), "cannot read the trace"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line_with_the_cure(
    options: tuple[str, ...], text: str
) -> None:
    error = refused(*options)
    assert text in error
    assert error.startswith("bifolio: ")
    assert len(error.splitlines()) == 1


def test_planning_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from bifolio.cli.main import app; "
        "app(['plan', '-m', 'kimi-k2.6', '-d', 'h200', '--tp', '8', '--json'], "
        "standalone_mode=False); "
        "assert not {'torch', 'numpy'} & set(sys.modules), 'heavy import'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_gguf_file_is_planned_from_its_header(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    matrices = _write_gguf(path)
    found = values("-m", str(path), "-d", "ryzen-7950x", "--input", "100", "--output", "20")
    weights = found["phases"]["decode"]["weight_bytes"]
    assert sum(weights.values()) - weights["norms"] == matrices
    assert any("int4:g32:z" in line for line in found["assumptions"])
    assert any(f"{path.stat().st_size:,} B" in line for line in found["assumptions"])


def test_a_matrix_of_several_types_is_planned_as_bf16_as_it_is_served(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    _write_gguf(path, finer=("token_embd", "blk.0.attn_v"))
    found = values("-m", str(path), "-d", "ryzen-7950x", "--input", "100", "--output", "20")
    qkv, output = 64 * (64 + 32 + 32), 64 * 64
    attention = found["phases"]["decode"]["weight_bytes"]["attention"]
    assert attention == 2 * qkv + output * 20 // 32


def test_the_default_model_is_planned_as_it_is_served() -> None:
    options = ("-m", "smollm2-135m", "-d", "epyc-9654", "--cache", "fp8")
    weights = values(*options)["phases"]["decode"]["weight_bytes"]
    assert weights["embedding"] == 49152 * 576 * 34 // 32
    assert weights["dense_mlp"] == 30 * 3 * 1536 * 576 * 20 // 32
    text = " ".join(run(*options).split())
    assert "as `bifolio serve smollm2-135m` has them; for those published, --plan bf16" in text


def _write_gguf(path: Path, finer: tuple[str, ...] = ("token_embd",)) -> int:
    """A llama of one layer, Q4_1 matrices but for `finer` ones in Q8_0; the matrices' bytes."""
    hidden, width, vocab = 64, 96, 320
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(width)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["x"] * vocab)
    q4_1, q8_0 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0
    shapes = {
        "token_embd": (vocab, hidden),
        "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (hidden // 2, hidden),
        "blk.0.attn_v": (hidden // 2, hidden),
        "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_gate": (width, hidden),
        "blk.0.ffn_up": (width, hidden),
        "blk.0.ffn_down": (hidden, width),
    }
    total = 0
    for name, shape in shapes.items():
        kind = q8_0 if name in finer else q4_1
        stored = gguf.quantize(np.zeros(shape, np.float32), kind)
        total += stored.nbytes
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=kind)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return total


def test_a_device_that_reaches_half_of_its_rates_takes_twice_the_time() -> None:
    full = values("-m", "kimi-k2.6", *H200, "--cache", "fp8")
    half = values("-m", "kimi-k2.6", *H200, "--cache", "fp8", "--efficiency", "50")
    rows = zip(*(f["phases"]["decode"]["ceilings"] for f in (full, half)), strict=True)
    for fast, slow in rows:
        assert slow["seconds_per_token"] == pytest.approx(2 * fast["seconds_per_token"])
    assert half["cache_tokens"] == full["cache_tokens"]


def test_this_machine_is_measured_by_the_native_kernels() -> None:
    if not available():
        assert "or choose a preset with --device" in refused("-m", "smollm2-135m")
        return
    found = values("-m", "smollm2-135m", "--memory", "1GiB")["device"]
    assert found["memory_bytes"] == 2**30
    # Anything that runs this test, and others beside it, reads between 1 MB/s and 10 TB/s.
    assert 1e6 < found["read_bytes_per_second"] < 1e13
    assert "native kernels measured now" in found["source"]


@pytest.mark.parametrize(
    ("free", "left", "asked", "expected"),
    [(8, None, None, 8), (8, 3, None, 3), (8, 3, 64, 64)],
)
def test_this_machine_has_the_memory_that_is_free_now(
    free: int, left: int | None, asked: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not available():
        pytest.skip("this build has no native kernels")
    found = MachineLimits(
        cores=2,
        cores_allowed=1,
        cpu_quota=None,
        memory_total=16,
        memory_available=free,
        memory_limit=left and left + 1,
        memory_left=left,
    )
    monkeypatch.setattr(plan_machine, "read_limits", lambda: found)
    for rate in ("_read_rate", "_multiply_rate"):
        monkeypatch.setattr(plan_machine, rate, lambda *_: 1.0)
    assert plan_machine.measure_machine(asked).memory_bytes == expected
