"""`bifolio chat`: a conversation, or one question, with a server of its own or a running one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bifolio.cli.console import DEFAULT_MODEL
from bifolio.cli.output_paths import finite
from bifolio.errors import ConfigError

if TYPE_CHECKING:
    from bifolio.cli.chat_session import Conversation
    from bifolio.cli.child_server import Event


def chat(
    model: Annotated[
        str | None,
        typer.Argument(
            help="What to serve, as for `bifolio serve`; with --url the name of a model there.",
            show_default=f"{DEFAULT_MODEL}, or the first one at --url",
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", help="Ask this, print the answer, stop.", metavar="TEXT"),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Talk to this server instead of starting one.", metavar="http://HOST:PORT"
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="Key for the server at --url.", envvar="BIFOLIO_API_KEY", metavar="KEY"),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(help="Formats of the server that is started, e.g. int4:g32:a8/fp8."),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="System message of the conversation.", metavar="TEXT")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 is greedy.", show_default="the server's", callback=finite),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest answer.", show_default="up to the context", min=1)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Makes sampled answers repeatable.", show_default="random")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with the answer and its figures.")
    ] = False,
) -> None:
    """Talk to a model in the terminal.

    Without --url a server is started for the time of the conversation.
    Without --prompt the question is read from standard input, if that is
    not a terminal; the end of its last line is no part of it. Below an
    answer stand its figures: tokens in and out, time to the first one,
    pace, cached tokens, pages checked.

    [bold]Examples[/]

      bifolio chat
      bifolio chat -p 'What is the capital of France?' --temperature 0
      bifolio chat --url http://127.0.0.1:8000 --system 'Answer in one word.'
      cat article.txt | bifolio chat --json --max-tokens 100
    """
    from bifolio.cli.chat_session import interact

    if url is not None and plan is not None:
        raise ConfigError("--plan is for a server that is started; one at --url has its plan")
    interactive = prompt is None and sys.stdin.isatty()
    if interactive and as_json:
        raise ConfigError("--json needs a question: give --prompt, or pipe one in")
    text = prompt if prompt is not None or interactive else _read_question()
    if text is not None and not text.strip():
        raise ConfigError("the question is empty; give one with --prompt or on standard input")
    options = {"temperature": temperature, "max_completion_tokens": max_tokens, "seed": seed}
    options = {key: value for key, value in options.items() if value is not None}
    with ExitStack() as stack:
        conversation = _connect(stack, model, url, api_key, plan, options)
        if system is not None:
            conversation.system = system
        if text is None:
            interact(conversation)
        else:
            _answer_once(conversation, text, as_json)


def _read_question() -> str:
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8 text: {error.reason}") from error


def _connect(
    stack: ExitStack,
    model: str | None,
    url: str | None,
    api_key: str | None,
    plan: str | None,
    options: dict[str, Any],
) -> Conversation:
    """A conversation with the server at `url`, or with one that ends with `stack`."""
    from bifolio.cli.api_client import ChatClient
    from bifolio.cli.chat_session import Conversation
    from bifolio.cli.child_server import serving

    if url is None:
        arguments = ["--plan", plan] if plan is not None else []
        with _starting() as starting:
            server = stack.enter_context(serving(model or DEFAULT_MODEL, arguments, starting))
        url, model, api_key = server.url, server.model, server.api_key
    client = stack.enter_context(ChatClient(url, api_key))
    return Conversation(client, model or client.first_model(), options)


@contextmanager
def _starting() -> Iterator[Callable[[Event], None]]:
    """Show on standard error, if that is a terminal, how far the server has come."""
    from rich.console import Console

    from bifolio.cli.child_server import ignore
    from bifolio.progress_bars import Bars

    console = Console(stderr=True)
    if not console.is_terminal:
        yield ignore
        return
    with Bars(console) as bars:
        bars("starting", 0, 0)

        def show(event: Event) -> None:
            if event["event"] == "progress":
                bars(str(event["stage"]), int(event["done"]), int(event["total"]))

        yield show


def _answer_once(conversation: Conversation, text: str, as_json: bool) -> None:
    import dataclasses
    import json

    from bifolio.cli.console import figures_text, write

    if as_json:
        answer = conversation.say(text)
        print(json.dumps(dataclasses.asdict(answer), ensure_ascii=False))
    else:
        answer = conversation.say(text, write)
        print(flush=True)
        print(figures_text(answer), file=sys.stderr)
    if answer.interrupted:
        raise KeyboardInterrupt
