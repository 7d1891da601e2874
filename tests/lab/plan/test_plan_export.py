"""Commands for other engines, and what those engines cannot do."""

from __future__ import annotations

import pytest

from bifolio.errors import ConfigError
from bifolio.formats import PrecisionPlan
from bifolio.lab.plan.export import Export, export_plan
from bifolio.lab.plan.published import preset_deployment


def export(engine: str, model: str = "kimi-k2.6", **texts: str) -> Export:
    plan = PrecisionPlan.parse(**texts)
    return export_plan(engine, preset_deployment(model, "h200", 8), plan, "owner/model")


def test_a_plan_that_is_alike_in_both_phases_is_one_server() -> None:
    sglang, vllm = (export(engine, plan="auto/fp8") for engine in ("sglang", "vllm"))
    assert len(sglang.commands) == len(vllm.commands) == 1
    for wanted in ("--model-path owner/model", "--tp 8", "--kv-cache-dtype fp8_e4m3"):
        assert wanted in sglang.commands[0]
    assert "--disaggregation-mode" not in sglang.commands[0]
    for wanted in ("vllm serve owner/model", "--tensor-parallel-size 8", "--kv-cache-dtype fp8"):
        assert wanted in vllm.commands[0]


def test_unlike_phases_are_two_servers_and_a_router_with_one_cache_format() -> None:
    for engine in ("sglang", "vllm"):
        found = export(engine, "glm-5.2", prefill="fp8/bf16", decode="int4:g32/fp8")
        assert len(found.commands) == 3
        servers = found.commands[:2]
        assert len({c.split("--kv-cache-dtype ")[1].split()[0] for c in servers}) == 1
        assert len({c.split("--port ")[1].split()[0] for c in found.commands}) == 3
        text = " ".join(found.lost)
        assert "refuses a prefill and a decode server whose caches differ" in text
        assert "a checkpoint of its own" in text
        assert "fp8 for prefill and int4:g32 for decode" in text


def test_what_both_engines_lack_is_always_said() -> None:
    for engine in ("sglang", "vllm"):
        assert any("not the one" in line for line in export(engine, plan="auto/bf16").lost)
        scaled = export(engine, "llama-70b", plan="auto/fp8:token")
        assert any("scale per token and head" in line for line in scaled.lost)
        plain = export(engine, "llama-70b", plan="auto/fp8")
        assert any("one scale per tensor" in line for line in plain.lost)
        sparse = export(engine, "glm-5.2", plan="auto/fp8")
        assert any("656 B" in line for line in sparse.lost)
        assert not any(
            "scale" in line for line in export(engine, "glm-5.2", plan="auto/fp8:token").lost
        )


def test_another_weight_format_needs_another_checkpoint() -> None:
    assert any("give it one in int8" in line for line in export("vllm", plan="int8/bf16").lost)
    assert not any("give it" in line for line in export("vllm", plan="auto/bf16").lost)


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="engines: sglang, vllm"):
        export("tgi", plan="auto/bf16")
