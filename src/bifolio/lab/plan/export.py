"""Launch commands of other engines that come closest to a plan, and what they cannot do of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import msgspec

from bifolio.errors import ConfigError
from bifolio.formats import CacheFormat, Number, PhasePlan, PrecisionPlan
from bifolio.lab.plan.capacity import Deployment

LaunchEngine = Literal["sglang", "vllm"]
"""Engines that commands can be printed for."""

_PREFILL_PORT, _DECODE_PORT, _ROUTER_PORT = 30000, 30001, 8000


class Export(msgspec.Struct, frozen=True):
    """Shell commands, each to be started in turn, and what gets lost."""

    engine: str
    commands: tuple[str, ...]
    lost: tuple[str, ...] = msgspec.field(name="cannot")


def export_plan(engine: str, deployment: Deployment, plan: PrecisionPlan, model: str) -> Export:
    """Commands that serve `model` (a hub id or a folder) as nearly as the engine can.

    One server where both phases are alike, else a prefill and a decode server; PREFILL_HOST and
    DECODE_HOST stand for their machines. ConfigError names the engines that there are.
    """
    engines = get_args(LaunchEngine)
    if engine not in engines:
        raise ConfigError(f"--export {engine}: no such engine; engines: {', '.join(engines)}")
    split = plan.prefill != plan.decode
    make = _sglang if engine == "sglang" else _vllm
    commands = make(deployment, plan, model, split)
    return Export(engine, commands, tuple(_lost(engine, deployment, plan, split)))


def _sglang(
    deployment: Deployment, plan: PrecisionPlan, model: str, split: bool
) -> tuple[str, ...]:
    def server(role: str, port: int, cache: CacheFormat) -> str:
        parts = [
            f"python -m sglang.launch_server --model-path {model} --tp {deployment.tp}",
            f"--kv-cache-dtype {_sglang_cache(cache)} --page-size {_page(deployment)}",
            f"--mem-fraction-static {deployment.memory_share / 100:.2f}",
            f"--host 0.0.0.0 --port {port}",
        ]
        if role:
            parts.append(f"--disaggregation-mode {role}")
        return " ".join(parts)

    # Both sides must have one cache format: the decode side decides, for there memory counts.
    cache = plan.decode.cache
    if not split:
        return (server("", _PREFILL_PORT, cache),)
    return (
        server("prefill", _PREFILL_PORT, cache),
        server("decode", _DECODE_PORT, cache),
        "python -m sglang_router.launch_router --pd-disaggregation "
        f"--prefill http://PREFILL_HOST:{_PREFILL_PORT} --decode http://DECODE_HOST:{_DECODE_PORT} "
        f"--port {_ROUTER_PORT}",
    )


def _vllm(deployment: Deployment, plan: PrecisionPlan, model: str, split: bool) -> tuple[str, ...]:
    def server(port: int, cache: CacheFormat) -> str:
        parts = [
            f"vllm serve {model} --tensor-parallel-size {deployment.tp}",
            f"--kv-cache-dtype {_vllm_cache(cache)} --block-size {_page(deployment)}",
            f"--gpu-memory-utilization {deployment.memory_share / 100:.2f}",
            f"--host 0.0.0.0 --port {port}",
        ]
        if split:
            parts.append(
                '--kv-transfer-config \'{"kv_connector": "NixlConnector", "kv_role": "kv_both"}\''
            )
        return " ".join(parts)

    cache = plan.decode.cache
    if not split:
        return (server(_PREFILL_PORT, cache),)
    return (
        f"VLLM_NIXL_SIDE_CHANNEL_PORT=5600 {server(_PREFILL_PORT, cache)}",
        f"VLLM_NIXL_SIDE_CHANNEL_PORT=5601 {server(_DECODE_PORT, cache)}",
        # The proxy that vLLM's guide to this connector starts, from its source tree.
        "python tests/v1/kv_connector/nixl_integration/toy_proxy_server.py "
        f"--prefiller-hosts PREFILL_HOST --prefiller-ports {_PREFILL_PORT} "
        f"--decoder-hosts DECODE_HOST --decoder-ports {_DECODE_PORT} --port {_ROUTER_PORT}",
    )


def _page(deployment: Deployment) -> int:
    """Latent attention's kernels in both engines read pages of 64 tokens."""
    return 64 if deployment.model.mla else deployment.page_size


def _sglang_cache(cache: CacheFormat) -> str:
    return "fp8_e4m3" if cache.number is Number.FP8 else "auto"


def _vllm_cache(cache: CacheFormat) -> str:
    return "fp8" if cache.number is Number.FP8 else "auto"


def _lost(engine: str, deployment: Deployment, plan: PrecisionPlan, split: bool) -> list[str]:
    """What of the plan, and of what bifolio does with it, the engine has no counterpart for."""
    name = {"sglang": "SGLang", "vllm": "vLLM"}[engine]
    prefill, decode = plan.prefill, plan.decode
    lost = []
    if prefill.cache != decode.cache:
        lost.append(
            f"{name} refuses a prefill and a decode server whose caches differ, and converts "
            f"nothing on hand-off: both get {decode.cache}, where the plan has {prefill.cache} "
            "for prefill"
        )
    lost += _lost_weights(name, prefill, decode, split)
    lost += _lost_scales(name, deployment, [prefill.cache, decode.cache])
    if engine == "vllm":
        lost.append(
            "vLLM counts the activations of a trial run inside --gpu-memory-utilization: fewer "
            "tokens fit than planned unless it is raised"
        )
    lost.append(f"{name} ends no request when a page is not the one that the request wrote")
    return lost


def _lost_scales(name: str, deployment: Deployment, caches: list[CacheFormat]) -> list[str]:
    if deployment.model.indexer:
        if any(cache.static_scales for cache in caches):
            return [
                f"{name}'s sparse attention on Hopper keeps fp8 latents with a scale per 128 "
                "(656 B), not plain (576 B): plan for fp8:token"
            ]
        return []
    if any(cache.token_scales for cache in caches):
        finer = "per token and 128 latents" if deployment.model.mla else "per token and head"
        return [
            f"{name} has no scale {finer} for fp8 pages of this model: it uses one per tensor, 1.0 "
            "with a warning where the checkpoint has none"
        ]
    if any(cache.static_scales for cache in caches):
        return [
            f"{name} keeps one scale per tensor for fp8 pages, 1.0 with a warning where the "
            "checkpoint has none"
        ]
    return []


def _lost_weights(name: str, prefill: PhasePlan, decode: PhasePlan, split: bool) -> list[str]:
    lost = []
    if split and replace(prefill, cache=decode.cache) != decode:
        lost.append(
            f"{name} serves a checkpoint as it is stored: give each server a checkpoint of its "
            f"own, {_stored_text(prefill)} for prefill and {_stored_text(decode)} for decode"
        )
    elif decode.weights is not None or decode.experts is not None:
        lost.append(
            f"{name} serves a checkpoint as it is stored: give it one in {_stored_text(decode)}"
        )
    if decode.head or prefill.head:
        lost.append(f"{name} has no format of its own for embedding and head")
    return lost


def _stored_text(plan: PhasePlan) -> str:
    """`fp8`, or `bf16 with experts in int4:g32`."""
    weights = str(plan.weights or "as published")
    return weights if plan.experts is None else f"{weights} with experts in {plan.experts}"
