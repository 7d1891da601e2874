"""The text process: renders chat templates and tokenizes, where it can be ended.

A template, a tokenizer or a request may take any time and any memory. So the work is done by
processes of their own, one job at a time (`server.text_pool` starts and ends them), under a limit
of memory. Each ends with the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import signal
import socket
import sys
from pathlib import Path

import msgspec

from bifolio.checkpoint.gguf import GGUFFile
from bifolio.errors import BifolioError, RequestError
from bifolio.process.channel import Channel
from bifolio.server.prepare import BodyRoute, Prepared, prepare
from bifolio.text.prompt_ids import TextLimits
from bifolio.text.tokenizer_files import TextTools, load_text_side

LOAD_BYTES = 3 * 2**30
"""Most memory that loading a tokenizer and a template may take."""

JOB_BYTES = 2**30
"""Most memory that one request may take on top of that."""

KEPT_BYTES = 256 * 2**20
"""A process that has grown by more than this is replaced."""

_PR_SET_PDEATHSIG = 1


class LoadText(msgspec.Struct, frozen=True, tag=True):
    """Where tokenizer and template are: a folder or a GGUF file, and a template that goes first."""

    path: str
    chat_template: str = ""


class TextJob(msgspec.Struct, frozen=True, tag=True):
    """One request body."""

    route: BodyRoute
    data: bytes
    limits: TextLimits


class TextReady(msgspec.Struct, frozen=True, tag=True):
    """The text side is loaded. `stop_ids` are end tokens, that of the template among them."""

    template: str | None
    stop_ids: list[int]


class TextFailed(msgspec.Struct, frozen=True, tag=True):
    """A job, or the start, ended with an error of class `kind`. `worn`: take another process."""

    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    worn: bool = False


class TextDone(msgspec.Struct, frozen=True, tag=True):
    """The result of a job. `worn`: the process has grown; take another one."""

    prepared: Prepared
    worn: bool = False


TextMessage = TextReady | TextFailed | TextDone


def _load(order: LoadText) -> TextTools:
    path = Path(order.path)
    return load_text_side(GGUFFile(path).metadata if path.is_file() else path, order.chat_template)


def _memory() -> tuple[int, int]:
    """Bytes of private memory that may be written (what RLIMIT_DATA counts), and resident bytes."""
    pages = Path("/proc/self/statm").read_text().split()
    size = os.sysconf("SC_PAGE_SIZE")
    return int(pages[5]) * size, int(pages[1]) * size


def _limit(more: int) -> None:
    with contextlib.suppress(OSError, ValueError):  # no /proc, or a lower hard limit
        resource.setrlimit(resource.RLIMIT_DATA, (_memory()[0] + more, resource.RLIM_INFINITY))


def _failed(error: Exception, worn: bool) -> TextFailed:
    match error:
        case RequestError():
            return TextFailed("RequestError", str(error), error.param, error.code, worn)
        case BifolioError():
            return TextFailed(type(error).__name__, str(error), worn=worn)
        case MemoryError():
            text = f"the request needs more than {JOB_BYTES >> 20} MiB of memory to be read"
            return TextFailed("RequestError", text, worn=True)
        case RecursionError():
            return TextFailed("RequestError", "the request is nested too deeply", worn=worn)
    logging.getLogger(__name__).error("a request could not be prepared", exc_info=error)
    return TextFailed("BifolioError", "internal error", worn=worn)


def _run(channel: Channel[LoadText | TextJob]) -> None:
    text: TextTools | None = None
    grown = sys.maxsize
    while True:
        for message in channel.receive(3600.0):
            answer: TextMessage
            try:
                if isinstance(message, LoadText):
                    _limit(LOAD_BYTES)
                    text = _load(message)
                    _limit(JOB_BYTES)
                    grown = _memory()[1] + KEPT_BYTES
                    stop_ids = sorted(text.tokenizer.stop_ids)
                    answer = TextReady(text.template.text if text.template else None, stop_ids)
                else:
                    assert text is not None, "LoadText comes first"
                    done = prepare(message.route, message.data, text, message.limits)
                    answer = TextDone(done, _memory()[1] > grown)
            except (MemoryError, RecursionError) as error:
                if text is None:
                    what = "memory" if isinstance(error, MemoryError) else "nesting"
                    answer = TextFailed(
                        "ConfigError",
                        f"the tokenizer or the chat template needs too much {what} to load",
                    )
                else:
                    answer = _failed(error, worn=True)
            except Exception as error:  # any error of a template or a tokenizer ends its job only
                answer = _failed(error, _memory()[1] > grown)
            channel.send(answer)
            channel.flush(60.0)


def main(fd: int) -> int:
    """Serve jobs over the inherited socket `fd` until it closes; the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):  # not Linux: the channel tells it later
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    decoder = msgspec.msgpack.Decoder(LoadText | TextJob)
    channel: Channel[LoadText | TextJob] = Channel(socket.socket(fileno=fd), decoder)
    with contextlib.suppress(EOFError):
        _run(channel)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
