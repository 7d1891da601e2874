"""Damages commands at random: options, files, variables; and says what becomes of them.

python damaged_commands.py SEED COUNT     a line of JSON for each of COUNT damaged commands

No command does its work: where it would start an engine, a server, a download or a measurement, it
ends with an error of ours, by which it counts as sound.
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any
from unittest import mock

import typer
from typer.testing import CliRunner

from bifolio.cli.main import app
from bifolio.errors import BifolioError
from support.damaged_json import ODD, change, doubled, nested
from support.tiny import tiny_config, write_model

SECONDS = 10
"""The longest that a command may take."""

MOST_CHARS, MOST_LINES = 3000, 25
"""On standard error: a message of 1,000 characters, in a box of 80 columns with its usage."""

MEMORY = 8 << 30
"""Address space of a process that runs damaged commands."""

REACHED = "the work begins"
"""Of the error in place of the work of a command."""

_TEXT = "the capital of the country is in the north and the river runs to the sea " * 400
_TOML = {
    "model": "tiny",
    "plan": "bf16/bf16",
    "cache_memory": "64MiB",
    "port": 0,
    "max_num_seqs": 4,
    "api_keys": ["a", "b"],
    "request_timeout": 5.0,
    "integrity": True,
}
_CLUSTER = "\n[cluster]\nray = 'local'\n[cluster.prefill]\ncpus = 1\nresources = {a = 1.0}\n"
_ITEMS = [{"id": str(i), "prompt": "the sea", "answer": "north"} for i in range(5)]
_AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{i:02}.680,{100 + i},{10 + i}\n" for i in range(20)
)
_MOONCAKE = "".join(
    json.dumps({"timestamp": i, "input_length": 600, "output_length": 5, "hash_ids": [0, i]}) + "\n"
    for i in range(20)
)
_EVALUATION = {
    "schema": "bifolio.eval/1",
    "kind": "tasks",
    "created": "2026-12-01T00:00:00Z",
    "command": ["bifolio", "eval", "tasks"],
    "model": {"name": "tiny", "digest": "abc"},
    "reference": {"plan": "bf16/bf16"},
    "candidate": {"plan": "bf16/fp8"},
    "tasks": [
        {
            "task": "copy",
            "language": "en",
            "verdict": "equivalent",
            "items": 64,
            "margin": 0.05,
            "reference": {"accuracy": 0.5},
            "candidate": {"accuracy": 0.48},
            "difference": -0.02,
            "bootstrap": [-0.05, 0.02],
        }
    ],
}
_FILES = ("azure.csv", "mooncake.jsonl", "items.jsonl", "text.txt", "server.toml", "cluster.toml")
_ODD_PATHS = (
    *("missing", "pipe", "folder", "tiny", "empty", "loop", "dangling", "huge", "zeros", "page"),
    *(
        "/dev/null",
        "/dev/zero",
        "/dev/full",
        "/proc/self/mem",
        "/proc/nowhere/x",
        "tiny/config.json",
    ),
    *("", ".", "..", "a" * 300, "a/" * 2000, "\udcff\udcfe", "a\nb", "\x1b[2J", "~nobody/x", "-"),
    *("text.txt/x", "loop/x", "http://127.0.0.1:1/x", "\u202e", "sealed"),
)
_PLANS = (
    *("bf16/bf16", "int8/fp8", "int4:g32:a8/fp8:token", "fp8/bf16->int4:g32/bf16", "auto/bf16"),
    *("weights=fp8,cache=bf16,page=32", "fp4/bf16", "int4:g0/bf16", "int4:g33/bf16", "/", "//"),
    *(
        "weights=",
        "weights=fp8,weights=fp8",
        "page=0",
        "page=99999999999",
        "page=-1",
        "->",
        "a->b->c",
    ),
    *(
        "int8/fp8/bf16",
        "BF16/BF16",
        " bf16 / bf16 ",
        "int4:g32:z:a8:a8/bf16",
        "cache=fp8",
        "bf16,bf16",
    ),
    *(
        "fp8:b128:b128/bf16",
        "head=int4",
        "experts=int4:g32,weights=bf16,cache=fp8",
        "=" * 50,
        ":" * 500,
    ),
)
_ODD_TEXTS = (
    *(
        "",
        " ",
        "x",
        "-1",
        "0",
        "1",
        "1e999",
        "nan",
        "inf",
        "-inf",
        "1.5",
        "0x10",
        "1_000",
        "٣",
        "²",
    ),
    *(
        "9" * 30,
        "9" * 5000,
        "-" + "9" * 30,
        "a" * 100_000,
        "--help",
        "-",
        "--",
        "null",
        "true",
        "None",
    ),
    *(
        "\udcff",
        "a\nb\nc",
        "\x1b[2J\x1b[31m",
        "\r",
        "\t",
        "\x7f",
        "\u202e",
        "é",
        "[/]",
        "[bold]",
    ),
    *(
        "{}",
        "%s%n",
        "$(id)",
        "../x",
        "a,b",
        ",",
        ",,,",
        "1,0",
        "1,,2",
        "1..0",
        "0..0",
        "5..",
        "a:b:c",
    ),
    *("normal:1e400:1", "lognormal:512:nan", "normal:5:-5", "1..1000000000000", "auto", "auto,1"),
)
_SIZES = (
    "0",
    "1B",
    "256MiB",
    "1e9GiB",
    "-1GiB",
    "1.5.5G",
    "1 GiB",
    "9" * 400 + "GiB",
    "1XB",
    "0.0001kB",
)
_URLS = (
    *(
        "http://127.0.0.1:1",
        "http://[::1",
        "http://",
        "://",
        "ftp://127.0.0.1:1",
        "http://127.0.0.1:0",
    ),
    *(
        "http://127.0.0.1:99999999",
        "http://127.0.0.1:1/\n",
        "http://a b",
        "127.0.0.1:1",
        "http://é:1",
    ),
    *(
        "http://\udcff:1",
        "http://user:pass@127.0.0.1:1",
        "http://" + "a" * 5000,
        "file:///etc/passwd",
    ),
    *("https://127.0.0.1:1", "http://127.0.0.1:1/v1", "HTTP://127.0.0.1:1", "http://127.0.0.1:x"),
)
_BY_METAVAR: dict[str, tuple[str, ...]] = {
    "PLAN": _PLANS,
    "FORMAT": ("bf16", "fp8", "fp8:token", "fp4", *_PLANS),
    "SIZE": _SIZES,
    "URL": _URLS,
    "http://HOST:PORT": _URLS,
    "NpMd": (
        "1p1d",
        "0p1d",
        "1p0d",
        "65p1d",
        "99999p1d",
        "1p1d1p",
        "p1d",
        "1P1D",
        "٣p1d",
        "1p1d\n",
    ),
    "TOKENS": ("64", "10..20", "normal:64:8", "lognormal:64:8", "0", "-1", "10..", "normal:64"),
    "N,N,…": ("1", "1,8", "auto", "0", "1,x", "1.5", "99999999999", "nan"),
    "R,R,…": ("1", "0.5,2", "0", "nan", "inf", "1e-300", "1e300", "-1"),
    "DEVICE": ("h200", "epyc-9654", "H200", "nothing"),
    "ADDRESS": ("127.0.0.1", "localhost", "::1", "256.0.0.1", "1", "nowhere.invalid", "0.0.0.0\n"),
    "ORIGIN": ("*", "http://a", "a", "http://a/b", "http://"),
    "KEY": ("k", " ", "é", "\udcff"),
}
_BY_NAME: dict[str, tuple[str, ...]] = {
    "model": (
        "tiny",
        "llama-70b",
        "smollm2-135m",
        "owner/missing",
        "owner/x/y.gguf@main",
        *_ODD_PATHS,
    ),
    "source": ("tiny", "kimi-k2.6", "smollm2-135m", "owner/missing", *_ODD_PATHS),
    "plan": _PLANS,
    "plans": (*_PLANS, *_URLS),
    "name": ("p0", "d1", "p", "p-1", "p٣", "p0/../d0", "p" + "9" * 500),
    "pool": ("prefill", "decode", "both"),
    "names": ("arc_easy", "mmlu", "nothing", "gsm8k,mmlu"),
    "weights": ("int4:g32", "int8", "fp8", "bf16", "int4:g32:z", "int4:g32:a8", "int3"),
    "method": ("rtn", "gptq", "awq", "RTN"),
    "only": ("experts", "all"),
    "keep": ("*.down_proj", "[", "re:(a+)+$", "**", "re:["),
    "task": ("copy", "kv", "c", "nothing"),
    "chat_template": _ODD_PATHS,
    "margin": ("0.05", "0.5", "0.51", "0", "-1", "nan", "inf", "", "x", "1e-300", "9" * 5000),
    "items": ("1", "4", "0", "-1", "100001", "9" * 30, "1.5", "", "x", "9" * 5000),
}
_LONG = {"margin", "items"}
"""Options of which a sound value can ask for minutes of work before an engine is started."""

_SOUND: dict[str, str] = {
    "model": "tiny",
    "source": "tiny",
    "device": "h200",
    "url": "http://127.0.0.1:1",
    "port": "0",
    "host": "127.0.0.1",
    "pool": "decode",
    "name": "p0",
    "names": "arc_easy",
    "plans": "bf16/bf16",
    "weights": "int8",
    "prompt": "the sea",
    "config": "server.toml",
    "trace": "azure.csv",
    "file": "cluster.toml",
    "calibration": "text.txt",
    "text": "text.txt",
    "files": "items.jsonl",
    "folder": "results",
    "margin": "0.05",
    "calibration_tokens": "4096",
    "tokens": "4096",
}
_VARIABLES = {
    "BIFOLIO_API_KEY": ("", " ", "a b", "\udcff", "é", "a" * 100_000),
    "BIFOLIO_ADMIN_KEY": ("", "k", "\udcff", "\n"),
    "BIFOLIO_HOME": ("", "/dev/null", "/proc/nowhere", "a" * 5000, "~nobody"),
    "BIFOLIO_ISA": ("", "avx512", "nothing", "\udcff"),
    "COLUMNS": ("0", "-1", "x", "40"),
    "TERM": ("", "dumb", "xterm-256color"),
    "NO_COLOR": ("1",),
    "HOME": ("", "/dev/null"),
    "TMPDIR": ("/dev/null", "/nowhere"),
    "LANG": ("C", "tlh"),
}


class OverTimeError(BaseException):
    """Of a command that takes too long; nothing but this module may catch it."""


class ReachedError(BifolioError):
    """In place of the work of a command."""


@dataclass(slots=True)
class Case:
    """A command line, the variables and standard input that it gets, and what is wrong with it."""

    command: list[str]
    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    stdin: bytes = b""
    done: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str
    error: str = ""
    """A traceback."""


# The commands, as typer has them


@functools.cache
def commands() -> dict[str, Any]:
    """Commands by their names, subcommands with those of their groups."""
    return dict(_walk(typer.main.get_command(app), ()))


def _walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    subcommands = getattr(command, "commands", {})
    if path and (not subcommands or command.invoke_without_command):
        yield " ".join(path), command
    for name, below in subcommands.items():
        yield from _walk(below, (*path, name))


def _kind(parameter: Any) -> type:
    """What a parameter holds, of a list one entry."""
    annotation = parameter.type_descriptor.annotation
    inner = getattr(annotation, "__args__", None)
    return inner[0] if inner else annotation


def _sound(parameter: Any, rng: random.Random) -> str:
    kind = _kind(parameter)
    if parameter.name in _SOUND:
        return _SOUND[parameter.name]
    if issubclass(kind, Enum):
        return str(rng.choice(list(kind)).value)
    if kind is Path:
        return f"out-{parameter.name}"
    if kind in (int, float):
        low = parameter.min if parameter.min is not None else 1
        return str(kind(max(low, 1) if parameter.max is None else low))
    known = _BY_METAVAR.get(parameter.metavar) or _BY_NAME.get(parameter.name) or ("x",)
    return known[0]


def _odd(parameter: Any, rng: random.Random) -> str:
    kind = _kind(parameter)
    special = _BY_NAME.get(parameter.name) or _BY_METAVAR.get(parameter.metavar)
    if special and (parameter.name in _LONG or rng.random() < 0.7):
        return rng.choice(special)
    if kind is Path and rng.random() < 0.8:
        return rng.choice((*_ODD_PATHS, *_FILES))
    if issubclass(kind, Enum) and rng.random() < 0.5:
        return rng.choice([str(choice.value).upper() for choice in kind] + ["auto", "AUTO"])
    if kind in (int, float) and rng.random() < 0.6:
        bounds = [bound for bound in (parameter.min, parameter.max) if bound is not None] or [0]
        near = [kind(bound + step) for bound in bounds for step in (-1, -0.001, 0, 0.001, 1)]
        return str(rng.choice([*near, 2**31, 2**63, -(2**63), 2**64, 10**25, 1e300, -0.0]))
    return rng.choice(_ODD_TEXTS)


# Damage


def damaged(seed: int) -> Case:
    """The case of a seed; its files are those of `write_files`."""
    rng = random.Random(seed)
    known = commands()
    name = rng.choice(list(known))
    case = Case(name.split(" "))
    parameters = [p for p in known[name].params if p.type_descriptor and p.name != "help"]
    options = [p for p in parameters if p.opts[0].startswith("-")]
    options = [p for p in options if p.required or rng.random() < 0.12]
    if name in (
        "eval distance",
        "eval tasks",
        "eval gate",
        "eval harness",
        "bench",
        "bench compare",
    ):
        options += [p for p in parameters if p.opts[0] == "--model"]  # else the default is fetched
    wrong = rng.choices((0, 1, 2, 3), (2, 7, 2, 1))[0]
    targets = rng.sample(parameters, min(wrong, len(parameters)))
    for parameter in dict.fromkeys([*options, *targets]):
        _add(rng, case, parameter, wrong=parameter in targets)
    for parameter in parameters:  # arguments come last, behind a `--` now and then
        if parameter.opts[0].startswith("-") or parameter in targets:
            continue
        if parameter.required or rng.random() < 0.7:
            case.arguments += [_sound(parameter, rng)] * (2 if parameter.name == "plans" else 1)
    if rng.random() < 0.1:
        variable = rng.choice(list(_VARIABLES))
        case.environment[variable] = rng.choice(_VARIABLES[variable])
        case.done.append(f"{variable}={case.environment[variable][:20]!r}")
    if rng.random() < 0.08:
        odd = rng.choice(
            ("--no-such", "-x", "--mod", "--model=", "-", "--", "extra", "-h", "--json=1")
        )
        case.arguments.insert(rng.randrange(len(case.arguments) + 1), odd)
        case.done.append(f"{odd} added")
    case.stdin = rng.choice((b"", b"the sea\n", b"\xff\xfe", b"\0" * 100, b" \n"))
    case.arguments = [text.replace("\0", "") for text in case.arguments]
    return case


def _add(rng: random.Random, case: Case, parameter: Any, *, wrong: bool) -> None:
    option = parameter.opts[0]
    if _kind(parameter) is bool:
        flags = [*parameter.opts, *parameter.secondary_opts]
        case.arguments.append(rng.choice(flags) + (rng.choice(("", "=x", "=")) if wrong else ""))
        return
    value = _odd(parameter, rng) if wrong else _sound(parameter, rng)
    if wrong:
        case.done.append(f"{option} {value[:40]!r}")
    if not option.startswith("-"):
        case.arguments.append(value)
    elif rng.random() < 0.3:
        case.arguments.append(f"{option}={value}")
    else:
        case.arguments += [option, value]
    if wrong and rng.random() < 0.1:
        case.arguments += [option, _odd(parameter, rng)]
        case.done.append("given twice")


def write_files(folder: Path, seed: int, model: Path) -> None:
    """What commands find in their folder: a model, sound files or damaged ones, and oddities."""
    rng = random.Random(-seed)
    (folder / "tiny").symlink_to(model)
    toml = "".join(f"{key} = {json.dumps(value)}\n" for key, value in _config(rng).items())
    texts = {
        "azure.csv": _AZURE,
        "mooncake.jsonl": _MOONCAKE,
        "items.jsonl": "".join(json.dumps(item) + "\n" for item in _changed(rng, _ITEMS)),
        "text.txt": _TEXT,
        "server.toml": toml,
        "cluster.toml": toml + _CLUSTER,
    }
    for name, text in texts.items():
        data = text.encode("utf-8", "surrogatepass")
        (folder / name).write_bytes(_bytes(rng, data) if rng.random() < 0.3 else data)
    for name in ("folder", "results", "sealed"):
        (folder / name).mkdir()
    (folder / "sealed").chmod(0)
    for source in sorted(RESULTS.glob("*.json")):
        document = json.loads(source.read_bytes())
        for _ in range(rng.choice((0, 1, 1, 3))):
            change(rng, document)
        text = json.dumps(document)
        text = rng.choice((text, text, text, text, nested(text), doubled(text)))
        data = text.encode("utf-8", "surrogatepass")
        data = _bytes(rng, data) if rng.random() < 0.1 else data
        (folder / "results" / source.name).write_bytes(data)
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "empty").touch()
    (folder / "zeros").write_bytes(b"\0" * 1000)
    (folder / "page").write_text("<!DOCTYPE html><p>Log in")
    with (folder / "huge").open("wb") as file:
        file.truncate(2**40)


_HOME = tempfile.gettempdir()
RESULTS = Path(_HOME) / "nowhere"
"""Sound results of plan, bench and eval; `prepared` sets it."""


def _config(rng: random.Random) -> dict[str, Any]:
    [config] = _changed(rng, [_TOML])
    if rng.random() < 0.2:
        config["no_such_key"] = 1
    return {key: value for key, value in config.items() if value is not None}


def _changed(rng: random.Random, documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    documents = json.loads(json.dumps(documents))
    if rng.random() < 0.5:
        change(rng, documents[0], [value for value in ODD if value is not None])
    return documents


def _bytes(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return rng.choice(
        (
            lambda: data[:at],
            lambda: data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
            lambda: data[:at] + rng.choice((b"\xff", b"\0", b'"', b"\n", b"[")) + data[at:],
            lambda: b"\xef\xbb\xbf" + data,
            lambda: data.decode("latin-1").encode("utf-16"),
            lambda: b"[" * 100_000,
            lambda: data * 3,
        )
    )()


# Running


def _reached(*_: Any, **__: Any) -> Any:
    raise ReachedError(REACHED)


@contextmanager
def prepared(folder: Path, *, benchmark: bool = False) -> Iterator[Path]:
    """A folder with a tiny model and results to damage, in a process whose commands do no work.

    `benchmark`: whether results of a benchmark are among them, which takes seconds.
    """
    from bifolio.lab.bench.target import Description
    from bifolio.lab.plan.hardware import find_device

    told = Description("plan", "tiny", "bf16/bf16", "reference", 320, 512, 1000, 1000)
    places: dict[str, Any] = {
        "bifolio.cli.launch._ServerRun.serve": _reached,
        "bifolio.cli.launch._end_with_stdin": lambda: None,
        "bifolio.cli.child_server.serving": _reached,
        "bifolio.lab.bench.in_process.InProcess.__init__": lambda *_: None,
        "bifolio.lab.bench.in_process.InProcess.describe": lambda _: told,
        "bifolio.lab.bench.in_process.InProcess.close": lambda _: None,
        "bifolio.cli.bench_run._warm_up": _reached,
        "bifolio.lab.eval.subject.Engine": _reached,
        "bifolio.checkpoint.source.fetch_builtin": _reached,
        "bifolio.cluster.deploy.connect": _reached,
        "bifolio.lab.compress.run.compress_checkpoint": _reached,
        "bifolio.lab.compress.cache_calibration.measure_scales": _reached,
        "bifolio.cli.plan_machine.measure_machine": lambda _: find_device("epyc-9654"),
    }
    offline = mock.patch.dict(os.environ, {"HF_HUB_OFFLINE": "1", "COLUMNS": "80"})
    patches = [mock.patch(place, stub) for place, stub in places.items()]
    model = write_model(folder / "model", tiny_config(num_hidden_layers=1, hidden_size=32))
    results = folder / "sound results"
    made = [["plan", "-m", "llama-70b", "-d", "h200", "--tp", "4", "--out", str(results)]]
    if benchmark:
        few = ["--input", "20", "--output", "3", "--concurrency", "1", "--requests", "2"]
        few += ["--repeats", "1", "--threads", "1", "--cache-memory", "1MiB"]
        made.append(["bench", "-m", str(model), *few, "--out", str(results)])
    for command in made:
        found = CliRunner().invoke(app, command)
        assert found.exit_code == 0, (found.stderr, found.exception)
    (results / "eval.json").write_text(json.dumps(_EVALUATION))
    for patch in (offline, *patches):
        patch.start()
    try:
        with mock.patch.object(sys.modules[__name__], "RESULTS", results):
            yield model
    finally:
        for patch in reversed((offline, *patches)):
            patch.stop()


def run(case: Case) -> Outcome:
    """Run a command in this process, in the folder that it is in."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)}
    signal.signal(signal.SIGALRM, _alarm)
    signal.alarm(2 * SECONDS)
    try:
        found = CliRunner().invoke(
            app, [*case.command, *case.arguments], input=case.stdin, env=case.environment
        )
    except OverTimeError as error:
        return Outcome(0, "", "", "".join(traceback.format_exception(error)))
    finally:
        signal.alarm(0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    raised = found.exception
    trace = ""
    if raised is not None and not isinstance(raised, SystemExit):
        trace = "".join(traceback.format_exception(raised))
    return Outcome(found.exit_code, found.stdout, found.stderr, trace)


def _alarm(*_: Any) -> None:
    raise OverTimeError(f"more than {2 * SECONDS} s")


def wrong(case: Case, outcome: Outcome) -> str | None:
    """What is wrong with the end of a command, if anything."""
    if outcome.error or "Traceback" in outcome.stderr:
        return outcome.error or outcome.stderr
    if outcome.code not in (0, 1, 2):
        return f"exit code {outcome.code}"
    text = outcome.stderr
    if len(text) > MOST_CHARS or text.count("\n") > MOST_LINES:
        return f"{len(text)} characters in {text.count(chr(10))} lines: {text[:3000]}"
    if outcome.code == 2 and not text:
        # A group without a command shows its help.
        return None if "Usage" in outcome.stdout else "no word on standard error"
    if control := re.findall(r"[^\n -~\xa0-\U0010ffff]|[\u2028-\u202e\u2066-\u2069]", text):
        return f"control characters {set(control)}: {text!r}"
    if outcome.code == 2 and not _names(case, text):
        return f"the input is not named: {text}"
    return None


def _names(case: Case, text: str) -> bool:
    """Whether an error names an option, an argument, a file or a value of a command."""
    typed = " ".join((*case.arguments, *case.environment, *_FILES, *_TOML))
    typed += " --url ADMIN_KEY folder question argument no_such_key standard input"
    words = re.findall(r"[a-z0-9]+", ascii(typed).lower())
    plain = re.sub(r"[^a-z0-9]", "", text.lower())
    return REACHED in text or any(word[:12] in plain for word in words)


def run_alone(case: Case) -> Outcome:
    """Run a command in a process of its own."""
    found = subprocess.run(
        [sys.executable, "-P", "-m", "bifolio", *case.command, *case.arguments],
        input=case.stdin,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **case.environment},
        capture_output=True,
        timeout=6 * SECONDS,  # most of which a busy machine takes to load Python
        check=False,
    )
    return Outcome(found.returncode, found.stdout.decode(), found.stderr.decode())


def check(seed: int, model: Path, *, alone: bool = False) -> tuple[Case, Outcome, str | None]:
    """Run the case of a seed in a folder of its own.

    With `alone`, what was refused in this process is refused alike in a process of its own.
    """
    case = damaged(seed)
    with tempfile.TemporaryDirectory(dir=_HOME) as folder:
        place = Path(folder) / "a" / "b"
        place.mkdir(parents=True)
        write_files(place, seed, model)
        with chdir(place):
            outcome = run(case)
            problem = wrong(case, outcome)
            if alone and problem is None and outcome.code == 2 and REACHED not in outcome.stderr:
                code, outcome = outcome.code, run_alone(case)
                same = f"{outcome.code} in a process of its own, {code} here: {outcome.stderr}"
                problem = wrong(case, outcome) or (None if outcome.code == code else same)
    return case, outcome, problem


def main() -> None:
    """Print what becomes of COUNT commands, each line as soon as it is known."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    seed, count = int(sys.argv[1]), int(sys.argv[2])
    with (
        tempfile.TemporaryDirectory() as folder,
        prepared(Path(folder), benchmark=True) as model,
    ):
        for number in range(seed, seed + count):
            case = damaged(number)
            print(json.dumps({"seed": number, "done": [*case.command, *case.done]}), flush=True)
            began = time.monotonic()
            case, outcome, problem = check(number, model, alone=number % 50 == 0)
            line = {
                "command": " ".join(case.command),
                "outcome": "reached" if REACHED in outcome.stderr else str(outcome.code),
                "wrong": problem,
                "seconds": round(time.monotonic() - began, 2),
                "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
