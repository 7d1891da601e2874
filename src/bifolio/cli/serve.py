"""`bifolio serve`: options and a configuration file become one ServerConfig, which is served."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from bifolio.cli.output_paths import plain


class KernelChoice(StrEnum):
    """Choices of --kernels."""

    AUTO = "auto"
    NATIVE = "native"
    REFERENCE = "reference"


class WorkerLoss(StrEnum):
    """Choices of --on-worker-loss."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


class TransportChoice(StrEnum):
    """Choices of --transport."""

    SHM = "shm"
    TCP = "tcp"


class Experts(StrEnum):
    """Choices of --experts."""

    MEMORY = "memory"
    MAPPED = "mapped"


class GenerationConfig(StrEnum):
    """Choices of --generation-config."""

    AUTO = "auto"
    NONE = "none"


class LogLevel(StrEnum):
    """Choices of --log-level."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def _option(panel: str, text: str, default: str, metavar: str | None = None, *names: str) -> Any:
    """An option whose default stands in `config`; `default` is how help shows it."""
    return typer.Option(
        *names, help=text, show_default=default, metavar=metavar, rich_help_panel=panel
    )


FORMATS, LIMITS, CACHE, NETWORK = "Formats and kernels", "Limits", "Cache", "Network and names"

Model = Annotated[
    str | None,
    typer.Argument(
        help="A folder, a .gguf file, a Hugging Face id, or a built-in name (smollm2-135m)."
    ),
]
Plan = Annotated[
    str | None,
    _option(
        FORMATS,
        "Formats of both phases: weights/cache, or weights=…,cache=…,head=…,page=…",
        "auto/bf16",
        "PLAN",
    ),
]
Prefill = Annotated[
    str | None, _option(FORMATS, "Formats of prefill, where they differ.", "--plan", "PLAN")
]
Decode = Annotated[
    str | None, _option(FORMATS, "Formats of decode, where they differ.", "--plan", "PLAN")
]
POOLS = "Two pools"
Pools = Annotated[
    str | None,
    _option(
        POOLS,
        "Workers for prefill and for decode, each phase in its formats: 1p1d, 2p1d, …",
        "one engine for both",
        "NpMd",
    ),
]
OnWorkerLoss = Annotated[
    WorkerLoss | None,
    _option(POOLS, "Requests of a lost worker: send them through again, or fail.", "recompute"),
]
PoolTransport = Annotated[
    TransportChoice | None,
    _option(POOLS, "What pages travel by between workers.", "shm", None, "--transport"),
]
KernelsOption = Annotated[
    KernelChoice | None,
    _option(FORMATS, "auto takes native ones where this machine has them.", "auto"),
]
Threads = Annotated[
    int | None,
    _option(
        FORMATS,
        "Threads of the kernels; 0 takes all cores that affinity and quota allow.",
        "0",
        "N",
    ),
]
ExpertsIn = Annotated[
    Experts | None,
    _option(
        FORMATS,
        "mapped keeps experts in files and the used ones in memory, for models larger than it.",
        "memory",
    ),
]
ExpertMemory = Annotated[
    str | None,
    _option(
        FORMATS, "Memory for mapped experts; 0 leaves it to the system's page cache.", "0", "SIZE"
    ),
]
CacheMemory = Annotated[
    str | None, _option(LIMITS, "Memory for cached keys and values.", "1GiB", "SIZE")
]
MaxModelLen = Annotated[
    int | None,
    _option(LIMITS, "Longest context in tokens; 0 takes what the model allows.", "0", "N"),
]
MaxNumSeqs = Annotated[int | None, _option(LIMITS, "Requests computed at a time.", "64", "N")]
MaxStepTokens = Annotated[
    int | None, _option(LIMITS, "Tokens of one step; longer prompts are cut.", "2048", "N")
]
MaxWaiting = Annotated[
    int | None, _option(LIMITS, "Requests that may wait; more get HTTP 429.", "1024", "N")
]
Integrity = Annotated[
    bool | None,
    _option(
        CACHE,
        "Check the tag of each page before and after each step.",
        "on",
        None,
        "--integrity/--no-integrity",
    ),
]
PrefixCache = Annotated[
    bool | None,
    _option(
        CACHE, "Reuse pages of equal beginnings.", "on", None, "--prefix-cache/--no-prefix-cache"
    ),
]
Host = Annotated[
    str | None, _option(NETWORK, "Address to listen on; 0.0.0.0 for all.", "127.0.0.1", "ADDRESS")
]
Port = Annotated[
    int | None, _option(NETWORK, "Port to listen on; 0 takes a free one and shows it.", "8000", "N")
]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        help="Key that clients must send; may be repeated. Other users of the machine can see "
        "options: the variable, with keys separated by spaces, is safer.",
        envvar="BIFOLIO_API_KEY",
        metavar="KEY",
        rich_help_panel=NETWORK,
    ),
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-host",
        help="Host name that requests to a loopback address may use; may be repeated, * for any.",
        metavar="NAME",
        show_default="localhost and addresses; any with an API key",
        rich_help_panel=NETWORK,
    ),
]
SharePrefixCache = Annotated[
    bool | None,
    _option(
        CACHE,
        "Share cached prefixes between API keys: faster, but timing tells what others asked.",
        "off",
        None,
        "--share-prefix-cache/--no-share-prefix-cache",
    ),
]
CorsOrigins = Annotated[
    list[str] | None,
    typer.Option(
        "--cors-origin",
        help="Origin of web pages that may use the server; may be repeated, * for any.",
        metavar="ORIGIN",
        show_default="none; pages of this machine with an API key",
        rich_help_panel=NETWORK,
    ),
]
MaxConnections = Annotated[
    int | None,
    _option(
        LIMITS,
        "Connections at a time; more get HTTP 503. 0: twice the queue, 4096 or more.",
        "0",
        "N",
    ),
]
MaxConnectionsPerAddress = Annotated[
    int | None,
    _option(
        LIMITS,
        "Connections of one client address; more get HTTP 429. 0: half of all.",
        "0",
        "N",
    ),
]
AdminKey = Annotated[
    str | None,
    typer.Option(
        "--admin-key",
        help="Lets `bifolio cluster` look at and change the workers of two pools.",
        envvar="BIFOLIO_ADMIN_KEY",
        metavar="KEY",
        show_default="nobody may",
        rich_help_panel=NETWORK,
    ),
]
ServedName = Annotated[
    str | None, _option(NETWORK, "Name of the model in the API.", "MODEL", "NAME")
]
ChatTemplate = Annotated[
    str | None, _option(NETWORK, "A jinja2 file to use as chat template.", "the model's", "FILE")
]
Recommended = Annotated[
    GenerationConfig | None,
    _option(
        NETWORK,
        "auto samples by the model's generation_config.json (or GGUF metadata) where a request "
        "leaves a parameter out.",
        "auto",
        None,
        "--generation-config",
    ),
]
DrainSeconds = Annotated[
    float | None,
    _option(NETWORK, "Time that open requests get when the server stops.", "30", "SECONDS"),
]
RequestTimeout = Annotated[
    float | None,
    _option(
        LIMITS,
        "Most time for a request, queue included; its own `timeout` may be shorter.",
        "no limit",
        "SECONDS",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        help="TOML file with these options, spelled with _ for -; the command line wins.",
        metavar="FILE.toml",
        callback=plain,
    ),
]
Level = Annotated[
    LogLevel | None, typer.Option(help="Least severe lines to log.", show_default="info")
]
UntilStdinCloses = Annotated[
    bool,
    typer.Option("--until-stdin-closes", help="Stop when standard input ends (for a parent)."),
]


def serve(
    model: Model = None,
    plan: Plan = None,
    prefill: Prefill = None,
    decode: Decode = None,
    pools: Pools = None,
    on_worker_loss: OnWorkerLoss = None,
    transport: PoolTransport = None,
    kernels: KernelsOption = None,
    threads: Threads = None,
    experts: ExpertsIn = None,
    expert_memory: ExpertMemory = None,
    cache_memory: CacheMemory = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    max_step_tokens: MaxStepTokens = None,
    max_waiting: MaxWaiting = None,
    integrity: Integrity = None,
    prefix_cache: PrefixCache = None,
    host: Host = None,
    port: Port = None,
    api_keys: ApiKeys = None,
    allowed_hosts: AllowedHosts = None,
    cors_origins: CorsOrigins = None,
    share_prefix_cache: SharePrefixCache = None,
    max_connections: MaxConnections = None,
    max_connections_per_address: MaxConnectionsPerAddress = None,
    admin_key: AdminKey = None,
    served_name: ServedName = None,
    chat_template: ChatTemplate = None,
    generation_config: Recommended = None,
    drain_seconds: DrainSeconds = None,
    request_timeout: RequestTimeout = None,
    config: ConfigFile = None,
    log_level: Level = None,
    until_stdin_closes: UntilStdinCloses = False,
) -> None:
    """Serve a model through the OpenAI API.

    Downloads the model if need be, loads it, and prints its address. Ctrl-C
    lets open requests end; a second one does not wait for them.

    [bold]Examples[/]

      bifolio serve smollm2-135m
      bifolio serve ./model.gguf --port 0 --cache-memory 4GiB
      bifolio serve smollm2-135m --plan int4:g32:a8/fp8 --max-model-len 4096
      bifolio serve smollm2-135m --pools 1p1d --prefill fp8/bf16 --decode int4:g32/fp8
      bifolio serve Qwen/Qwen2.5-0.5B-Instruct --served-name qwen
      BIFOLIO_API_KEY=secret bifolio serve --config server.toml
    """
    from bifolio.cli.launch import launch
    from bifolio.config import resolve

    options: dict[str, Any] = {
        "model": model,
        "plan": plan,
        "prefill": prefill,
        "decode": decode,
        "pools": pools,
        "on_worker_loss": on_worker_loss.value if on_worker_loss is not None else None,
        "transport": transport.value if transport is not None else None,
        "kernels": kernels.value if kernels is not None else None,
        "threads": threads,
        "experts": experts.value if experts is not None else None,
        "expert_memory": expert_memory,
        "cache_memory": cache_memory,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_step_tokens": max_step_tokens,
        "max_waiting": max_waiting,
        "integrity": integrity,
        "prefix_cache": prefix_cache,
        "log_level": log_level.value if log_level is not None else None,
        "host": host,
        "port": port,
        "admin_key": admin_key or None,
        "api_keys": tuple(api_keys) if api_keys else None,
        "allowed_hosts": tuple(allowed_hosts) if allowed_hosts else None,
        "share_prefix_cache": share_prefix_cache,
        "cors_origins": tuple(cors_origins) if cors_origins else None,
        "max_connections": max_connections,
        "max_connections_per_address": max_connections_per_address,
        "served_name": served_name,
        "chat_template": chat_template,
        "generation_config": generation_config.value if generation_config is not None else None,
        "drain_seconds": drain_seconds,
        "request_timeout": request_timeout,
    }
    launch(resolve(options, config), until_stdin_closes=until_stdin_closes)
