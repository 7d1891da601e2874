"""The commands as a user runs them: real processes, a real engine, a tiny model on disk."""

from __future__ import annotations

import codecs
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from support.tiny import tiny_config, write_model

ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(str(Path(p).absolute()) for p in sys.path if p),
    "OMP_NUM_THREADS": "1",
    "TERM": "dumb",
}
PATIENCE = 300.0
"""Seconds to wait for what is sure to come, on a machine however slow and busy."""
BIFOLIO = [sys.executable, "-P", "-m", "bifolio"]
OPTIONS = ["--kernels", "reference", "--cache-memory", "8MiB", "--threads", "1"]
QUESTION = [{"role": "user", "content": "the capital of the country"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows no end: its answers go on until they are stopped."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    config = tiny_config(max_position_embeddings=16_000, eos_token_id=None)
    write_model(path, config)
    (path / "generation_config.json").write_text("{}")
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": None}))
    return path


class Server:
    """`bifolio serve` and what it has logged until it was ready."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.events: list[dict[str, Any]] = []
        assert process.stderr is not None
        for line in process.stderr:
            self.events.append(json.loads(line))
            if self.events[-1]["event"] == "ready":
                return
        raise AssertionError(f"never ready: {self.events}")

    @property
    def ready(self) -> dict[str, Any]:
        return self.events[-1]

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    def ask(self, **options: Any) -> httpx.Response:
        body = {"messages": QUESTION, "temperature": 0, "max_tokens": 5, **options}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=PATIENCE)

    def wait(self) -> int:
        """Status of a server that was told to stop."""
        status = self.process.wait(PATIENCE)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{self.url}/health")
        return status


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Server]:
    with subprocess.Popen(
        [*BIFOLIO, "serve", str(folder), "--port", "0", *OPTIONS, *options],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Server(process)
        finally:
            if process.poll() is None:
                process.kill()


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder, "--served-name", "tiny") as running:
        yield running


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*BIFOLIO, *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        **options,
    )


def test_a_server_says_what_it_serves_and_serves_it(server: Server) -> None:
    ready = server.ready
    assert (ready["model"], ready["plan"]) == ("tiny", "bf16/bf16 page=16")
    assert ready["kernels"] == "reference"
    assert ready["cache_tokens"] == ready["pages"] * 16
    assert 0 < ready["cache_bytes"] <= 8 * 2**20
    assert server.events[0]["stage"] == "starting the engine"
    assert "weights" in {e.get("stage") for e in server.events}
    response = server.ask(model="tiny")
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == 5


def test_the_readmes_program_talks_to_it(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    (program,) = [block for block in blocks if "from openai import" in block]
    program = program.replace("http://127.0.0.1:8000", server.url).replace("smollm2-135m", "tiny")
    exec(
        compile(program.replace("temperature=0,", "temperature=0, max_tokens=5,"), "README", "exec")
    )
    expected = server.ask(messages=[{"role": "user", "content": "What is the capital of France?"}])
    assert capsys.readouterr().out == expected.json()["choices"][0]["message"]["content"]


def test_a_port_in_use_is_refused_before_the_model_is_loaded(server: Server) -> None:
    port = server.url.rsplit(":", 1)[1]
    result = run("serve", "no-such-model", "--port", port)
    assert result.returncode == 2
    assert result.stderr.startswith(f"bifolio: port {port} on 127.0.0.1 is taken")
    assert result.stderr.count("\n") == 1


def test_chat_prints_the_answer_and_its_figures(server: Server) -> None:
    options = ["-p", "the sea", "--url", server.url, "--temperature", "0", "--max-tokens", "6"]
    plain = run("chat", *options)
    assert plain.returncode == 0, plain.stderr
    found = json.loads(run("chat", *options, "--json").stdout)
    assert plain.stdout == found["text"] + "\n"
    assert found["completion_tokens"] == 6
    assert found["finish_reason"] == "length"
    assert found["prompt_tokens"] > found["cached_tokens"] >= 16  # the first run filled a page
    assert found["pages_checked"] > 0
    assert f"{found['prompt_tokens']} tokens in (0 cached) · 6 out" in plain.stderr


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self._fd, inside = pty.openpty()
        self.process = subprocess.Popen(
            [*BIFOLIO, *arguments], env=ENVIRONMENT, stdin=inside, stdout=inside, stderr=inside
        )
        os.close(inside)
        self.text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def until(self, done: Callable[[str], bool], seconds: float = PATIENCE) -> None:
        """Read what is printed until `done`."""
        deadline = time.monotonic() + seconds
        while not done(self.text):
            assert time.monotonic() < deadline, self.text
            if select.select([self._fd], [], [], 0.1)[0]:
                self.text += self._decoder.decode(os.read(self._fd, 4096))

    def until_count(self, words: str, count: int) -> None:
        self.until(lambda text: text.count(words) == count)

    def until_prompt(self) -> None:
        self.until(lambda text: text.rstrip(" ").endswith("›"))

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


@contextmanager
def terminal_with(*arguments: str) -> Iterator[Terminal]:
    terminal = Terminal(*arguments)
    try:
        yield terminal
    finally:
        terminal.close()


def test_a_conversation_at_a_terminal_goes_on_until_exit(server: Server) -> None:
    options = ["--url", server.url, "--temperature", "0", "--max-tokens", "4"]
    with terminal_with("chat", *options) as terminal:
        terminal.until_prompt()
        for turn in (1, 2):
            terminal.type("the river\r")
            terminal.until_count("pages checked", turn)
            terminal.until_prompt()
        terminal.type("/exit\r")
        assert terminal.process.wait(PATIENCE) == 0
    first, second = [line for line in terminal.text.splitlines() if "tokens in" in line]
    tokens = [int(line.split(" tokens in")[0]) for line in (first, second)]
    assert tokens[1] > tokens[0] + 4  # the second turn carries the first
    assert "(0 cached)" not in second


def test_control_c_stops_an_answer_and_not_the_conversation(server: Server) -> None:
    options = ["--url", server.url, "--temperature", "0"]
    with terminal_with("chat", *options) as terminal:
        terminal.until_prompt()
        terminal.type("the river\r")
        terminal.until(lambda text: len(text.partition("› the river")[2]) > 20)
        terminal.process.send_signal(signal.SIGINT)
        terminal.until_count("interrupted", 1)
        terminal.until_prompt()
        terminal.type("\x04")
        assert terminal.process.wait(PATIENCE) == 0


def test_chat_starts_a_server_of_its_own_and_leaves_none_behind(
    folder: Path, tmp_path: Path
) -> None:
    for module in ("structlog", "msgspec", "torch"):  # no file here may stand for a module of ours
        (tmp_path / f"{module}.py").write_text("raise SystemExit('imported from the folder')")
    asked = ("-p", "the sea", "--json", "--max-tokens", "3", "--temperature", "0")
    result = run("chat", str(folder), *asked, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["completion_tokens"] == 3
    assert result.stderr == ""
    started = [p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])]
    assert not [line for line in started if {str(folder), "--until-stdin-closes"} <= set(line)]


def test_a_stopped_server_lets_open_streams_end(folder: Path) -> None:
    with serving(folder, "--drain-seconds", "300") as server:
        with httpx.stream(
            "POST",
            f"{server.url}/v1/chat/completions",
            json={
                "messages": QUESTION,
                "stream": True,
                "max_tokens": 60,
                "ignore_eos": True,
                "stream_options": {"include_usage": True},
            },
            timeout=PATIENCE,
        ) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = [line.removeprefix("data: ") for line in lines if line]
        assert rest[-1] == "[DONE]"
        assert json.loads(rest[-2])["usage"]["completion_tokens"] == 60
        assert server.wait() == 0


@pytest.fixture
def hang_ups_count() -> Iterator[None]:
    """Tests that run under nohup would hand on that hang-ups are ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hang_ups_count")
def test_a_hang_up_stops_one_engine_in_order(folder: Path) -> None:
    with serving(folder) as server:
        server.process.send_signal(signal.SIGHUP)
        assert server.wait() == 0


def test_a_hang_up_of_the_whole_group_replaces_the_workers_of_two_pools(folder: Path) -> None:
    with serving(folder, "--pools", "1p1d") as server:
        before = server.ask().json()["choices"]
        workers = engines(server)
        for process in [*workers, server.process]:
            process.send_signal(signal.SIGHUP)
        assert server.ask().json()["choices"] == before
        assert server.process.stderr is not None
        events = (json.loads(line) for line in server.process.stderr)
        seen: list[tuple[str, str | None]] = []
        while ("worker replaced", "d0") not in seen:
            event = next(events)
            seen.append((event["event"], event.get("worker")))
        assert ("worker replaced", "p0") in seen
        assert "worker lost" not in [name for name, _ in seen]
        assert server.ask().json()["choices"] == before
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def engines(server: Server) -> list[psutil.Process]:
    """The children of a server that compute; others render and tokenize."""
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if "bifolio.process.worker" in child.cmdline()]


def test_an_engine_that_died_is_logged_and_replaced(folder: Path) -> None:
    with serving(folder) as server:
        assert server.process.stderr is not None
        before = server.ask().json()["choices"]
        [engine] = engines(server)
        engine.kill()
        seen: list[str] = []
        while "the engine is back" not in seen:
            line = server.process.stderr.readline()
            assert line, "the server ended"
            event = json.loads(line)
            seen.append(event["event"])
            if event["event"] == "the engine died":
                assert event["level"] == "error"
                assert "has ended" in event["reason"]
        assert "the engine died" in seen
        assert server.ask().json()["choices"] == before
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def test_a_server_ends_with_its_parents_pipe(folder: Path) -> None:
    with serving(folder, "--until-stdin-closes") as server:
        assert server.ask().status_code == 200
        assert server.process.stdin is not None
        server.process.stdin.close()
        assert server.wait() == 0


@pytest.mark.parametrize("command", [("serve",), ("chat", "-p", "hello")])
def test_a_damaged_model_is_one_line_and_status_2(tmp_path: Path, command: tuple[str, ...]) -> None:
    folder = write_model(tmp_path / "tiny", tiny_config())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    name, *options = command
    result = run(name, str(folder), *options, *(["--port", "0"] if name == "serve" else []))
    assert result.returncode == 2
    last = result.stderr.splitlines()[-1]
    assert last.startswith("bifolio: ")
    assert "model.safetensors" in last
    assert "Traceback" not in result.stderr
