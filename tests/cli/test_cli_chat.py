from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from bifolio.cli.api_client import ChatClient
from bifolio.cli.chat_session import Conversation, interact
from bifolio.cli.main import app
from support.fake_server import PARIS, FakeServer, chunk, refusal, running


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running(FakeServer()) as fake:
        yield fake


def chat(server: FakeServer, *arguments: str, **options: Any) -> Any:
    return CliRunner().invoke(app, ["chat", "--url", server.url, *arguments], **options)


def test_an_answer_is_printed_and_its_figures_go_to_standard_error(server: FakeServer) -> None:
    result = chat(server, "-p", "What is the capital of France?", "--system", "Be brief.")
    assert result.exit_code == 0
    assert result.stdout == "The capital is Paris.\n"
    assert "38 tokens in (16 cached) · 4 out · first after " in result.stderr
    assert "12 pages checked" in result.stderr
    assert server.bodies[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    assert server.bodies[0]["model"] == "fake"
    assert server.bodies[0]["stream_options"] == {"include_usage": True}


def test_json_is_one_object_with_the_answer_and_its_figures(server: FakeServer) -> None:
    result = chat(server, "--json", input="What is the capital of France?")
    answer = json.loads(result.stdout)
    assert answer["text"] == "The capital is Paris."
    assert answer["finish_reason"] == "stop"
    assert (answer["prompt_tokens"], answer["completion_tokens"]) == (38, 4)
    assert (answer["cached_tokens"], answer["pages_checked"]) == (16, 12)
    assert 0 < answer["time_to_first_token"] <= answer["seconds"]
    assert answer["interrupted"] is False


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_piped_question_is_the_same_with_and_without_the_end_of_its_line(
    server: FakeServer, end: str
) -> None:
    chat(server, input=f"Where?\nAnswer briefly.{end}")
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "Where?\nAnswer briefly."}]


def test_options_reach_the_request_and_absent_ones_do_not(server: FakeServer) -> None:
    chat(server, "other", "-p", "a", "--temperature", "0", "--max-tokens", "7", "--seed", "3")
    chat(server, "-p", "a")
    body, plain = server.bodies
    assert (body["model"], body["temperature"], body["seed"]) == ("other", 0.0, 3)
    assert body["max_completion_tokens"] == 7
    assert not {"temperature", "seed", "max_completion_tokens"} & set(plain)


def test_the_key_comes_from_the_option_or_the_environment(server: FakeServer) -> None:
    chat(server, "-p", "a", "--api-key", "one")
    chat(server, "-p", "a", env={"BIFOLIO_API_KEY": "two"})
    assert server.keys == ["Bearer one", "Bearer two"]


def test_a_proxy_does_not_stand_between_this_machine_and_itself(server: FakeServer) -> None:
    proxies = dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
    assert chat(server, "-p", "a", env=proxies).exit_code == 0


def test_a_refusal_is_one_line_and_status_2(server: FakeServer) -> None:
    server.replies = [refusal(400, "the prompt is longer than the context", param="messages")]
    result = chat(server, "-p", "a")
    assert result.exit_code == 2
    assert result.stderr == "bifolio: the prompt is longer than the context\n"
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-p", "  "], "the question is empty"),
        (["-p", "a", "--plan", "bf16/bf16"], "--plan is for a server that is started"),
    ],
)
def test_wishes_that_cannot_be_met_are_refused(
    server: FakeServer, arguments: list[str], words: str
) -> None:
    result = chat(server, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert server.bodies == []


class Terminal:
    """Stands for `input`: hands out lines, or raises what stands among them."""

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self.lines = list(lines)

    def __call__(self, prompt: str) -> str:
        line = self.lines.pop(0) if self.lines else EOFError
        if isinstance(line, str):
            return line
        raise line


def talk(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]
) -> Conversation:
    monkeypatch.setattr("builtins.input", Terminal(*lines))
    with ChatClient(server.url) as client:
        conversation = Conversation(client, "fake", {})
        interact(conversation)
    return conversation


def test_each_turn_carries_the_turns_before(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(server, monkeypatch, "Hello", "", "And?", "/exit", "never read")
    said = [[m["content"] for m in body["messages"]] for body in server.bodies]
    assert said == [["Hello"], ["Hello", "The capital is Paris.", "And?"]]
    assert capsys.readouterr().out.count("The capital is Paris.\n38 tokens in") == 2


def test_commands_change_the_conversation(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(server, monkeypatch, "a", "/reset", "b", "/system Be brief.", "c", "/system", "d", "/what")
    said = [[m["content"] for m in body["messages"]] for body in server.bodies]
    assert said == [["a"], ["b"], ["Be brief.", "c"], ["d"]]
    assert "unknown command /what" in capsys.readouterr().out


def test_a_failed_turn_is_reported_and_forgotten(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.replies = [[chunk("half")], refusal(429, "queue full"), PARIS]
    talk(server, monkeypatch, "a", KeyboardInterrupt, "b", "c")
    assert [m["content"] for m in server.bodies[2]["messages"]] == ["c"]
    printed = capsys.readouterr().out
    assert "ended its stream before the answer did" in printed
    assert "queue full" in printed
