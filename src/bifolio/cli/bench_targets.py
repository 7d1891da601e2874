"""What a benchmark drives, from the words of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bifolio.config import EngineConfig, parse_bytes
from bifolio.errors import ConfigError
from bifolio.lab.bench.dialect import EndpointType
from bifolio.lab.bench.target import Description, Target

if TYPE_CHECKING:
    from bifolio.cli.bench_options import BenchOptions
    from bifolio.cli.child_server import Event
    from bifolio.cli.progress import Reporter


def is_url(text: str) -> bool:
    """Whether a target is a server that runs already."""
    return "://" in text


def in_process(options: BenchOptions, seats: int, plan: str, report: Reporter) -> Target:
    """An engine in this process; `plan` as for serve."""
    from bifolio.checkpoint.source import resolve_source
    from bifolio.formats import PrecisionPlan
    from bifolio.lab.bench.in_process import InProcess

    if options.endpoint_type is not EndpointType.COMPLETIONS:
        raise ConfigError("--endpoint-type is for servers: give --server or a URL, too")
    config = EngineConfig.of(
        model=options.model,
        plan=PrecisionPlan.parse(plan),
        cache_memory=parse_bytes(options.cache_memory),
        max_num_seqs=seats,
        threads=options.threads,
    )
    resolve_source(options.model, report)

    def loading(_stage: str, done: int, total: int) -> None:
        report(f"loading {plan}", done, total)

    return InProcess(config, options.model, loading)


def endpoint(options: BenchOptions, url: str) -> Target:
    """A running server."""
    from bifolio.lab.bench.endpoint import Endpoint

    return Endpoint(
        url,
        options.api_key,
        model=options.served_model,
        vocab=options.vocab,
        kind=options.endpoint_type,
    )


@contextmanager
def own_server(options: BenchOptions, seats: int, plan: str, report: Reporter) -> Iterator[Target]:
    """`bifolio serve` in a process of its own, for as long as a `with` lasts."""
    from bifolio.cli.child_server import serving
    from bifolio.lab.bench.endpoint import Endpoint

    arguments = ["--plan", plan, "--cache-memory", options.cache_memory]
    arguments += ["--max-num-seqs", str(seats), "--threads", str(options.threads)]

    def on_event(event: Event) -> None:
        if event["event"] == "progress":
            report(f"{plan}: {event['stage']}", event["done"], event["total"])

    with serving(options.model, arguments, on_event) as server:
        told = _told(server.ready, _vocab(options.model))
        target = Endpoint(
            server.url, server.api_key, model=server.model, kind=options.endpoint_type, known=told
        )
        try:
            yield target
        finally:
            target.close()


def _told(ready: Event, vocab: int) -> Description:
    def number(name: str) -> Any:
        return ready.get(name)

    return Description(
        kind="own server",
        model=str(ready["model"]),
        plan=str(ready["plan"]),
        kernels=str(ready["kernels"]),
        vocab=vocab,
        max_model_len=number("max_model_len"),
        cache_tokens=number("cache_tokens"),
        cache_bytes=number("cache_bytes"),
    )


def _vocab(model: str) -> int:
    from bifolio.checkpoint.source import resolve_source

    return resolve_source(model).spec.vocab
