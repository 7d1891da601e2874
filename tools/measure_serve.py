"""Start `bifolio serve` with any options, generate, and print what it took as one line of JSON.

    measure_serve.py FOLDER --experts mapped --cache-memory 256MiB

Tokens per second of one request at a time (the first answer warms up and is told apart), resident
bytes of the engine process, and what its metrics say of weights and mapped experts. For a limit of
memory, put `systemd-run --user --scope -p MemoryMax=…` or the like before it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

TOKENS, ANSWERS = 64, 3
PROMPT = "the capital of the country is in the north and the river runs to the sea"
SURVEY_SECONDS = 12
"""Until the heartbeats have looked at every mapped expert once."""


def start(options: list[str]) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """A server, and what it says of itself once it is ready."""
    command = "from bifolio.cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", command, "serve", *options, "--port", "0", "--until-stdin-closes"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        record = json.loads(line) if line.startswith("{") else {}
        if record.get("event") == "ready":
            return process, record
        if record.get("event") != "progress":
            print(line, end="", file=sys.stderr)
    sys.exit(f"the server ended with {process.wait()}")


def resident(parent: int) -> dict[str, int]:
    """Bytes of the engine process, which is the larger child of the server."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    found = []
    for child in children:
        fields = dict(
            line.split(":", 1) for line in Path(f"/proc/{child}/status").read_text().splitlines()
        )
        keys = ("VmRSS", "VmHWM", "RssAnon", "RssFile")
        found.append({key: int(fields[key].split()[0]) * 1024 for key in keys if key in fields})
    return max(found, key=lambda one: one.get("VmRSS", 0))


def weight_bytes(client: httpx.Client) -> dict[str, int]:
    lines = client.get("/metrics").text.splitlines()
    found = [line.split('"') for line in lines if line.startswith("bifolio_weight_bytes{")]
    return {kind: int(float(rest.split()[-1])) for _, kind, rest in found}


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: measure_serve.py FOLDER [options of bifolio serve]")
    process, ready = start(sys.argv[1:])
    rates = []
    with httpx.Client(base_url=ready["url"], timeout=3600) as client:
        for seed in range(ANSWERS):
            body = {"model": ready["model"], "prompt": f"{seed} {PROMPT}", "max_tokens": TOKENS}
            began = time.perf_counter()
            answer = client.post("/v1/completions", json=body | {"ignore_eos": True, "seed": seed})
            answer.raise_for_status()
            count = answer.json()["usage"]["completion_tokens"]
            rates.append(round(count / (time.perf_counter() - began), 3))
        time.sleep(SURVEY_SECONDS)
        told = {
            "options": sys.argv[1:],
            "plan": ready["plan"],
            "kernels": ready["kernels"],
            "start_seconds": ready["start_seconds"],
            "tokens_per_second": {"first": rates[0], "then": rates[1:]},
            "weights": weight_bytes(client),
            "engine": resident(process.pid),
        }
    assert process.stdin is not None
    process.stdin.close()
    process.wait()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
