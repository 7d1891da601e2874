"""A conversation of several turns, and its loop at a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from rich.console import Console

from bifolio.cli.api_client import ChatAnswer, ChatClient, Message
from bifolio.cli.console import figures_text, write
from bifolio.errors import BifolioError

HELP = """\
/reset        forget the conversation
/system TEXT  set the system message and start again; without TEXT, none
/help         this
/exit         leave, as does Ctrl-D; Ctrl-C stops an answer"""


class Conversation:
    """Messages so far. A turn that fails leaves them as they were."""

    def __init__(self, client: ChatClient, model: str, options: dict[str, Any]) -> None:
        self.client = client
        self.model = model
        self.system: str | None = None
        self._options = options
        self._turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """What the next request carries, before the user's new text."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self._turns]

    def reset(self) -> None:
        self._turns.clear()

    def say(self, text: str, on_text: Callable[[str], None] | None = None) -> ChatAnswer:
        """One turn. The errors are those of ChatClient.ask."""
        question = {"role": "user", "content": text}
        answer = self.client.ask(self.model, [*self.messages, question], on_text, self._options)
        if answer.text:  # an answer stopped before its first word leaves no trace
            self._turns += [question, {"role": "assistant", "content": answer.text}]
        return answer


def interact(conversation: Conversation) -> None:
    """Read lines and answer them until the end of input or /exit."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives `input` line editing and a history)
    screen = Console(highlight=False, markup=False)
    screen.print(f"{conversation.model} · /help for commands", style="dim")
    while True:
        try:
            line = input("› ").strip()
        except EOFError:
            screen.print()
            return
        except UnicodeDecodeError:
            screen.print("(this is not UTF-8 text)", style="red")
            continue
        except KeyboardInterrupt:
            screen.print("\n(/exit or Ctrl-D leaves)", style="dim")
            continue
        if line in ("/exit", "/quit"):
            return
        if line.startswith("/"):
            screen.print(_command(conversation, line), style="dim")
        elif line:
            _turn(conversation, line, screen)


def _turn(conversation: Conversation, line: str, screen: Console) -> None:
    try:
        answer = conversation.say(line, write)
    except BifolioError as error:
        screen.print(f"\n{error}\n", style="red", soft_wrap=True)
        return
    screen.print(f"\n{figures_text(answer)}\n", style="dim", soft_wrap=True)


def _command(conversation: Conversation, line: str) -> str:
    """Obey a line that begins with a slash and say what was done."""
    name, _, rest = line.partition(" ")
    match name:
        case "/reset":
            conversation.reset()
            return "(conversation forgotten)"
        case "/system":
            conversation.reset()
            conversation.system = rest.strip() or None
            return "(system message set)" if conversation.system else "(no system message)"
        case "/help":
            return HELP
        case _:
            return f"(unknown command {name})\n{HELP}"
