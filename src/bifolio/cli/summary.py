"""What a server says of itself once it is ready: to people, and as one line of the log."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from rich.console import Console

from bifolio import __version__
from bifolio.checkpoint.default_sampling import DefaultSampling
from bifolio.cli.console import bytes_text
from bifolio.cli.tables import named
from bifolio.config import ServerConfig, size_text
from bifolio.engine.messages import EngineInfo

_QUESTION = "What is the capital of France?"


@dataclass(frozen=True, slots=True)
class Summary:
    """Lengths in tokens, sizes in bytes, times in seconds."""

    url: str
    model: str
    plan: str
    kernels: str
    experts: str
    max_model_len: int
    shortened_from: int
    """What the model knows, where the cache holds less and no limit was asked for; else 0."""
    cache_bytes_for_all: int
    """Cache memory that what the model knows would take; 0: not known."""
    page_size: int
    pages: int
    cache_tokens: int
    cache_bytes: int
    integrity: bool
    prefix_cache: bool
    api_key_needed: bool
    sampling: str
    """What the model's files recommend, where that differs from our defaults."""
    start_seconds: float

    @classmethod
    def of(
        cls,
        config: ServerConfig,
        hello: EngineInfo,
        url: str,
        name: str,
        sampling: DefaultSampling,
        start_seconds: float,
    ) -> Summary:
        """Put together what was configured and what the engine made of it."""
        return cls(
            url=url,
            model=name,
            plan=hello.plan,
            kernels=hello.kernels,
            experts=hello.experts,
            max_model_len=hello.max_model_len,
            shortened_from=(
                hello.model_positions
                if hello.max_model_len < hello.model_positions and not config.engine.max_model_len
                else 0
            ),
            cache_bytes_for_all=hello.model_bytes,
            page_size=hello.page_size,
            pages=hello.pages,
            cache_tokens=hello.pages * hello.page_size,
            cache_bytes=hello.pages * hello.page_bytes,
            integrity=config.engine.integrity,
            prefix_cache=config.engine.prefix_cache,
            api_key_needed=bool(config.api_keys),
            sampling=str(sampling),
            start_seconds=round(start_seconds, 3),
        )

    @property
    def context(self) -> str:
        """The longest context and, where the cache shortens it, what would not."""
        if not self.shortened_from:
            return f"{self.max_model_len:,} tokens"
        return (
            f"{self.max_model_len:,} of the {self.shortened_from:,} tokens that the model knows; "
            f"all take --cache-memory {size_text(self.cache_bytes_for_all)}"
        )


def curl_line(summary: Summary) -> str:
    """A command to paste into a shell."""
    body = {"model": summary.model, "messages": [{"role": "user", "content": _QUESTION}]}
    parts = ["curl", f"{summary.url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    command = " ".join(shlex.quote(part) for part in parts)
    if summary.api_key_needed:
        command += ' -H "Authorization: Bearer $BIFOLIO_API_KEY"'
    return f"{command} -d {shlex.quote(json.dumps(body))}"


def show(summary: Summary, screen: Console) -> None:
    """Print the summary for people."""
    checks = [
        "pages before and after each step" if summary.integrity else "PAGES NOT CHECKED",
        "prefix caching on" if summary.prefix_cache else "prefix caching off",
    ]
    rows = (
        ("model", summary.model),
        ("plan", summary.plan),
        ("kernels", summary.kernels),
        *((("experts", summary.experts),) if summary.experts else ()),
        (
            "cache",
            f"{summary.pages:,} pages of {summary.page_size} tokens: {summary.cache_tokens:,} "
            f"tokens in {bytes_text(summary.cache_bytes)}",
        ),
        ("checks", ", ".join(checks)),
        ("context", summary.context),
        *((("sampling", summary.sampling),) if summary.sampling else ()),
        ("address", f"{summary.url}/v1"),
    )
    screen.print(f"bifolio {__version__}, ready after {summary.start_seconds:.1f} s", style="green")
    screen.print(named(rows))
    screen.print("\nTry (Ctrl-C stops the server):\n")
    screen.print(curl_line(summary), soft_wrap=True, markup=False)
    screen.print()
