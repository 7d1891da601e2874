"""Structured logs on standard error: for people on a terminal, one JSON object a line otherwise."""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import Processor

_CHATTY = ("uvicorn", "httpx", "httpcore", "asyncio", "huggingface_hub")


class _StandardError(logging.Handler):
    """Writes to what sys.stderr is at that moment, so that lines pass above progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # In one piece: other processes write to the same file.
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:  # a reader that has gone must not end the server
            self.handleError(record)


def configure_library(level: str) -> None:
    """Hand structlog's records of `level` and above to the logging of the program that imports us.

    Nothing is changed that the program has set up: neither its handlers nor its structlog.
    """
    logging.getLogger("bifolio").setLevel(level.upper())
    if not structlog.is_configured():
        structlog.configure(
            processors=[
                structlog.stdlib.filter_by_level,
                structlog.processors.format_exc_info,
                structlog.processors.KeyValueRenderer(key_order=["event"]),
            ],
            logger_factory=structlog.stdlib.LoggerFactory(),
            wrapper_class=structlog.stdlib.BoundLogger,
        )


def configure(level: str, *, for_people: bool | None = None) -> None:
    """Send structlog's and the standard library's records of `level` and above to stderr.

    Called once in each process. `for_people` None looks whether stderr is a terminal. What chatty
    packages say below a warning counts as debug.
    """
    if for_people is None:
        for_people = sys.stderr.isatty()
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(
            fmt="%H:%M:%S" if for_people else "iso", utc=not for_people
        ),
    ]
    renderers: list[Processor] = (
        # Without the local variables of each frame: prompts are among them.
        [
            structlog.dev.ConsoleRenderer(
                colors=True, exception_formatter=structlog.dev.plain_traceback
            )
        ]
        if for_people
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    handler = _StandardError()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    logging.getLogger("bifolio").setLevel(logging.NOTSET)  # of `configure_library`
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    quiet = logging.DEBUG if level == "debug" else logging.WARNING
    for name in _CHATTY:
        logging.getLogger(name).setLevel(quiet)
