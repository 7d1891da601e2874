"""Half the bytes a token: twice the tokens in the same memory, and twice the requests at a time."""

from __future__ import annotations

import asyncio

import httpx
from test_cli_server import Server, serving

from support.tiny import tiny_config, write_model

PROMPT, ANSWER, CLIENTS = 160, 64, 60
BEATS = 12
"""Heartbeats of a busy engine to look at: `/metrics` shows the latest, some four a second."""
OPTIONS = (
    "--cache-memory",
    "2MiB",
    "--max-model-len",
    "512",
    "--no-prefix-cache",
    "--kernels",
    "native",
)


async def most_at_a_time(server: Server) -> tuple[int, float]:
    """Requests that the server computed together at most, and tokens that its cache holds."""
    most, tokens, beats = 0, 0.0, set[str]()
    body = {"prompt": [7] * PROMPT, "max_tokens": ANSWER, "ignore_eos": True, "temperature": 0}

    def enough() -> bool:
        """Beats, and of them one of an engine as full as so many clients make it in the end."""
        return len(beats) >= BEATS and most >= tokens // (PROMPT + ANSWER)

    async def ask() -> None:
        while not enough():  # more than fit, for as long as it takes
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text

    async with (
        httpx.AsyncClient(base_url=server.url, timeout=300) as client,
        # A connection of its own: it must not queue behind the requests that it watches.
        httpx.AsyncClient(base_url=server.url, timeout=300) as watcher,
        asyncio.timeout(300),
        asyncio.TaskGroup() as group,
    ):
        for _ in range(CLIENTS):
            group.create_task(ask())
        while not enough():
            metrics = dict(
                line.rsplit(" ", 1)
                for line in (await watcher.get("/metrics")).text.splitlines()
                if not line.startswith("#")
            )
            running = int(float(metrics["bifolio_num_requests_running"]))
            if running:
                beats.add(metrics["bifolio_generation_tokens_total"])
            most = max(most, running)
            tokens = float(metrics["bifolio_kv_cache_tokens"])
            await asyncio.sleep(0.02)
    return most, tokens


def test_fp8_pages_hold_twice_the_tokens_and_admit_twice_the_requests(tmp_path) -> None:
    """`fp8` at least 1.98 times (headers stay), `fp8:token` with its scales at least 1.93 times."""
    config = tiny_config(
        max_position_embeddings=1024, num_hidden_layers=4, num_key_value_heads=2, head_dim=64
    )
    folder = write_model(tmp_path / "tiny", config)
    measured = {}
    for cache in ("bf16", "fp8", "fp8:token"):
        with serving(folder, *OPTIONS, "--plan", f"bf16/{cache}") as server:
            measured[cache] = asyncio.run(most_at_a_time(server))
    for requests, tokens in measured.values():
        assert tokens // (PROMPT + ANSWER) <= requests <= tokens // PROMPT
    requests, tokens = measured["bf16"]
    for cache, ratio in (("fp8", 1.98), ("fp8:token", 1.93)):
        assert measured[cache][1] >= ratio * tokens
        assert measured[cache][0] > 1.3 * requests
