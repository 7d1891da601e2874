"""Start `bifolio serve` with any options, use it, and print what it took as one line of JSON.

    measure_serve.py FOLDER --experts mapped --cache-memory 256MiB

Of one request at a time: tokens per second of a prompt of PROMPT tokens, and of ANSWER tokens
behind it when its pages are there (the first round warms up and is told apart). Then chats, one and
several at once, whose streams must be whole and the same; `answers` is a digest of all tokens and
logprobs, to compare runs by. Beside it /health is asked all the time. Bytes of the engine process,
and what its metrics say of weights and mapped experts. For a limit of memory, put
`systemd-run --user --scope -p MemoryMax=…` or the like before it.
"""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

PROMPT, ANSWER, ROUNDS, CHATS = 512, 48, 3, 4
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
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return process, record
        if record.get("event") != "progress":
            print(line, end="", file=sys.stderr)
    sys.exit(f"the server ended with {process.wait()}")


class ServeSession:
    """Requests to one server, and a digest of what it answered."""

    def __init__(self, client: httpx.Client, model: str) -> None:
        self._client, self._model = client, model
        self.digest = hashlib.sha256()

    def timed(self, prompt: list[int], tokens: int) -> float:
        """Seconds of a greedy answer of so many tokens."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": tokens, "logprobs": 1}
        began = time.perf_counter()
        answer = self._client.post(
            "/v1/completions", json=body | {"ignore_eos": True, "temperature": 0}
        )
        answer.raise_for_status()
        seconds = time.perf_counter() - began
        found = answer.json()
        assert found["usage"]["completion_tokens"] == tokens, found["usage"]
        self.digest.update(json.dumps(found["choices"][0]["logprobs"]).encode())
        return seconds

    def chat(self, number: int) -> str:
        """All that a streamed chat brought, as text; AssertionError if the stream is not whole."""
        message = {"role": "user", "content": f"{number}: the river runs to the sea"}
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [message],
            "max_tokens": 16,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            lines = [line for line in answer.iter_lines() if line]
        assert all(line.startswith("data: ") for line in lines), lines
        assert lines[-1] == "data: [DONE]", lines[-1]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert chunks[-1]["usage"]["completion_tokens"] == 16, chunks[-1]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"], choices
        parts = [(c["logprobs"] or {}).get("content") for c in choices if "logprobs" in c]
        found = [entry for part in parts for entry in part or ()]
        assert len(found) == 16, found
        return json.dumps([(entry["bytes"], entry["logprob"]) for entry in found])

    def chats(self) -> float:
        """Tokens per second of several chats at once, which answer as each of them alone."""
        alone = [self.chat(number) for number in range(CHATS)]
        began = time.perf_counter()
        with ThreadPoolExecutor(CHATS) as pool:
            together = list(pool.map(self.chat, range(CHATS)))
        seconds = time.perf_counter() - began
        assert together == alone, "answers depend on what is computed beside them"
        self.digest.update("".join(alone).encode())
        return 16 * CHATS / seconds


@contextmanager
def asking_for_health(url: str) -> Iterator[dict[str, Any]]:
    """What /health answers meanwhile: how often, the slowest, and what was not 200."""
    told: dict[str, Any] = {"asked": 0, "slowest_seconds": 0.0, "not_200": 0}
    done = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            while not done.wait(0.25):
                began = time.perf_counter()
                status = client.get("/health").status_code
                took = round(time.perf_counter() - began, 3)
                told["asked"] += 1
                told["slowest_seconds"] = max(told["slowest_seconds"], took)
                told["not_200"] += status != 200

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield told
    finally:
        done.set()
        thread.join()


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


def rates(session: ServeSession) -> dict[str, list[float]]:
    """Tokens per second of each round."""
    found: dict[str, list[float]] = {"prefill": [], "decode": []}
    for seed in range(ROUNDS):
        prompt = random.Random(seed).choices(range(8, 256), k=PROMPT)
        found["prefill"].append(round(PROMPT / session.timed(prompt, 1), 2))
        found["decode"].append(round(ANSWER / session.timed(prompt, ANSWER), 3))
    return found


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: measure_serve.py FOLDER [options of bifolio serve]")
    process, ready = start(sys.argv[1:])
    loaded = resident(process.pid)
    with httpx.Client(base_url=ready["url"], timeout=3600) as client:
        session = ServeSession(client, ready["model"])
        with asking_for_health(ready["url"]) as health:
            speed = rates(session)
            together = round(session.chats(), 3)
        time.sleep(SURVEY_SECONDS)
        told = {
            "options": sys.argv[1:],
            "plan": ready["plan"],
            "kernels": ready["kernels"],
            "start_seconds": ready["start_seconds"],
            "tokens_per_second": speed | {f"{CHATS}_chats_at_once": together},
            "answers": session.digest.hexdigest()[:16],
            "health": health,
            "weights": weight_bytes(client),
            "engine_when_ready": loaded,
            "engine": resident(process.pid),
        }
    assert process.stdin is not None
    process.stdin.close()
    process.wait()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
