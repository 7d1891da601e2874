from __future__ import annotations

import re
import shlex
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bifolio import __version__
from bifolio.cli import main
from bifolio.cli.main import app, load
from bifolio.errors import CheckpointError

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "numpy", "pydantic", "httpx", "fastapi", "rich.progress", "structlog")


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def walked(command: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Commands with their paths, those of groups too."""
    below = getattr(command, "commands", {}).items()
    return [(path, command)] + [c for name, sub in below for c in walked(sub, (*path, name))]


@pytest.mark.parametrize("name", ["p0/../d0", "?pool=x", "", "d0/replace", "x1", "d٣"])
@pytest.mark.parametrize("command", ["remove", "replace"])
def test_no_other_path_is_reached_by_the_name_of_a_worker(command: str, name: str) -> None:
    result = invoke("cluster", command, name, "--admin-key", "k", "--url", "http://nowhere.invalid")
    assert result.exit_code == 2
    assert f"{name!r} is no worker's name" in result.stderr


def test_help_comes_without_importing_anything_heavy() -> None:
    script = (
        "import sys, bifolio.cli.main\n"
        "try: bifolio.cli.main.app(['--help'])\n"
        f"except SystemExit: print('loaded', *set({HEAVY!r}) & set(sys.modules))"
    )
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert out.splitlines()[-1].split() == ["loaded"]


@pytest.mark.parametrize("name", main.COMMANDS)
def test_the_list_of_commands_shows_the_first_line_of_the_help_of_each(name: str) -> None:
    assert load(name).help.partition("\n")[0] == main.COMMANDS[name]


def test_a_command_that_is_misspelled_is_found() -> None:
    result = invoke("serv")
    assert result.exit_code == 2
    assert "Did you mean 'serve'" in " ".join(result.stderr.split())


@pytest.mark.parametrize("command", ["serve", "chat", "doctor"])
def test_each_command_has_help_with_examples(command: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"  bifolio {command}" in result.stdout


def examples(text: str) -> list[list[str]]:
    """Arguments of the lines that call `bifolio`, up to a pipe or a comment."""
    lines = [line.strip().removeprefix("$ ") for line in text.splitlines()]
    calls = [re.sub(r"^(BIFOLIO_\w+=\S+ |cat \S+ \| )", "", line) for line in lines]
    found = []
    for call in calls:
        if re.match(r"bifolio [a-z]+($| )", call):
            words = re.split(r"  +[a-z]", call)[0]  # an explanation stands behind two spaces
            found.append(list(takewhile("|".__ne__, shlex.split(words, comments=True)[1:])))
    return found


COMMANDS: dict[str, Any] = {name: load(name) for name in main.COMMANDS}
DOCUMENTS = {f"{name} --help": command.help for name, command in COMMANDS.items()} | {
    path.name: path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]
}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_example_is_a_command_that_can_be_parsed(document: str) -> None:
    for name, *arguments in examples(DOCUMENTS[document]):
        command = COMMANDS[name]
        if arguments and arguments[0] in getattr(command, "commands", {}):
            command = command.commands[arguments.pop(0)]
        try:
            command.make_context(name, arguments)
        except Exception as error:
            raise AssertionError(f"bifolio {name} {shlex.join(arguments)}: {error}") from error


def test_help_of_no_command_imports_torch() -> None:
    script = (
        "import sys\n"
        "from bifolio.cli.main import COMMANDS, app\n"
        "for name in COMMANDS:\n"
        "  try: app([name, '--help'])\n"
        "  except SystemExit: print('after', name, 'loaded' if 'torch' in sys.modules else '')"
    )
    command = [sys.executable, "-c", script]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ends = [line.split() for line in out.splitlines() if line.startswith("after ")]
    assert ends == [["after", name] for name in main.COMMANDS]


def test_examples_are_found_where_there_are_some() -> None:
    assert all(examples(DOCUMENTS[f"{name} --help"]) for name in COMMANDS)
    assert ["chat", "--json", "--max-tokens", "100"] in examples(DOCUMENTS["chat --help"])
    assert ["doctor"] in examples(DOCUMENTS["README.md"])


def test_version() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"bifolio {__version__}\n")


def test_an_unknown_option_is_named() -> None:
    result = invoke("chat", "--no-such-option")
    assert result.exit_code == 2
    assert "--no-such-option" in result.stderr


@pytest.mark.parametrize(
    ("raised", "status", "stderr"),
    [
        (CheckpointError("x.gguf is damaged"), 2, "bifolio: x.gguf is damaged\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_of_ours_are_one_line_and_control_c_none(
    monkeypatch: pytest.MonkeyPatch, raised: BaseException, status: int, stderr: str
) -> None:
    def examine() -> None:
        raise raised

    monkeypatch.setattr("bifolio.cli.doctor.examine", examine)
    result = invoke("doctor")
    assert (result.exit_code, result.stderr) == (status, stderr)


def test_what_was_typed_reaches_the_terminal_escaped_and_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "0")  # on a screen without columns nothing would be seen
    for arguments in (
        ["plan", "-m", "\x1b[2J\u202e" + "a" * 100_000],
        ["doctor", "\x1b[2J\u202e" + "a" * 100_000],
        ["--\x1b[2J\u202e" + "a" * 100_000],
    ):
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert "x1b[2J" in result.stderr
        assert not {"\x1b", "\u202e"} & {*result.stderr}
        assert len(result.stderr) < 2500


NUMBERS = [
    (path, option.opts[0])
    for path, command in walked(typer.main.get_command(app))
    for option in command.params
    if option.type_descriptor and option.type_descriptor.annotation is float
]


@pytest.mark.parametrize(("path", "option"), NUMBERS)
def test_every_number_is_finite(path: tuple[str, ...], option: str) -> None:

    candidate = ["--candidate", "x"]
    sound = {"compare": ["x", "y"], "serve": ["x"], "harness": ["x", *candidate]}
    sound |= {"tasks": candidate, "gate": candidate}
    for value in ("inf", "nan", "-inf"):
        result = invoke(*path, *sound.get(path[-1], []), option, value)
        assert result.exit_code == 2, result.exception
        assert option.strip("-") in result.stderr.replace("_", "-")


def test_a_path_that_is_no_text_is_shown_escaped() -> None:
    result = CliRunner().invoke(app, ["cluster", "up", "\udcff"])
    assert "\\udcff" in result.stderr
    result = CliRunner().invoke(app, ["serve", "x", "--port", "0", "--host", "\udcff"])
    assert result.exit_code == 2
    assert "invalid --host '\\udcff'" in result.stderr


def test_a_question_that_is_no_text_is_refused() -> None:
    result = CliRunner().invoke(app, ["chat", "no-such-model"], input=b"\xff")
    assert result.exit_code == 2
    assert "standard input is not UTF-8 text" in result.stderr


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def examine() -> None:
        raise AssertionError("ours")

    monkeypatch.setattr("bifolio.cli.doctor.examine", examine)
    assert isinstance(invoke("doctor").exception, AssertionError)
