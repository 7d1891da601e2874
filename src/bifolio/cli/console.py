"""How things look to people: errors, numbers with units, the line below an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bifolio.wording import plural

if TYPE_CHECKING:
    from bifolio.cli.api_client import ChatAnswer

ERROR_PREFIX = "bifolio: "
"""What the one line begins with in which a command says why it failed."""

DEFAULT_MODEL = "smollm2-135m"
"""The built-in model that `chat` starts and examples name."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_text(count: float) -> str:
    """`1536` → `1.5 KiB`."""
    for unit in _UNITS[:-1]:
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"


def shortened(text: str, most: int = 1000) -> str:
    """A message with its middle left out, if it is longer: what was typed may be of any length.

    What a terminal would obey or cannot show is escaped.
    """
    if len(text) > most:
        text = f"{text[: most * 2 // 3]} … {text[-(most // 3) :]}"
    return "".join(char if char.isprintable() or char == "\n" else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()


def figures_text(answer: ChatAnswer) -> str:
    """The figures of an answer on one line; what the server did not report is left out."""
    parts = []
    if answer.prompt_tokens is not None:
        cached = f" ({answer.cached_tokens} cached)" if answer.cached_tokens is not None else ""
        parts.append(f"{plural(answer.prompt_tokens, 'token')} in{cached}")
    if answer.completion_tokens is not None:
        parts.append(f"{answer.completion_tokens} out")
    if answer.time_to_first_token is not None:
        parts.append(f"first after {answer.time_to_first_token:.2f} s")
    if answer.tokens_per_second is not None:
        parts.append(f"{answer.tokens_per_second:.1f} tokens/s")
    if answer.pages_checked is not None:
        parts.append(f"{plural(answer.pages_checked, 'page')} checked")
    if answer.workers:
        parts.append(f"by {', '.join(answer.workers)}")
    if answer.interrupted:
        parts.append("interrupted")
    elif answer.finish_reason not in (None, "stop"):
        parts.append(f"ended by {answer.finish_reason}")
    return " · ".join(parts)


def write(piece: str) -> None:
    """Print a piece of an answer at once."""
    print(piece, end="", flush=True)
