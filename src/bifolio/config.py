"""Configuration: read once from options and an optional TOML file, frozen afterwards."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from bifolio.errors import ConfigError, cause_of
from bifolio.formats import PrecisionPlan
from bifolio.input_files import parse_toml, read_text
from bifolio.machine import MAX_THREADS, default_threads
from bifolio.wording import shown

PREFILL_CHUNK = 256
"""Tokens of a step of a prefill worker, if nothing is asked for. Pages of one chunk travel while
the next is computed: of a prompt of 2,048 tokens, seven eighths have left when it is done."""

MAX_WORKERS = 64
"""Most workers of a pool when it starts."""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "k": 2**10, "m": 2**20, "g": 2**30}
_UNITS |= {"tib": 2**40, "t": 2**40}  # memories of machines for which one plans


def parse_bytes(text: str | int) -> int:
    """Read `256MiB`, `2GB`, `1.5g` (binary for bare letters) or a plain number of bytes."""
    if isinstance(text, int) and not isinstance(text, bool) and 0 <= text < 2**63:
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    if not isinstance(text, str) or not match or match[2].lower() not in _UNITS:
        raise ConfigError(
            f"cannot read {shown(text)} as a size; write 256MiB, 2GB or a number of bytes"
        )
    count = float(match[1]) * _UNITS[match[2].lower()]
    if count >= 2**63:
        raise ConfigError(f"{shown(text)} is more than any machine has")
    return round(count)


def size_text(count: int) -> str:
    """A number of bytes as users write it: what `parse_bytes` reads as the same number."""
    for unit in ("TiB", "GiB", "TB", "GB", "MiB", "MB", "KiB", "kB"):
        size = _UNITS[unit.lower()]
        if count >= size and count * 100 % size == 0:
            return f"{count / size:.2f}".rstrip("0").rstrip(".") + unit
    return str(count)


FORMATS, POOLS, LIMITS = "Formats and kernels", "Two pools", "Limits"
CACHE, NETWORK, OTHER = "Cache", "Network and names", "Options"


@dataclass(frozen=True, slots=True)
class Setting:
    """What users read of a setting, stated once beside its type, its default and its bounds.

    From it come the option of `bifolio serve`, its variable (`BIFOLIO_` and the key, in capitals),
    and its row in docs/options.md. In a TOML file it is a key at the top.
    """

    help: str
    panel: str
    metavar: str
    shown: str | None
    """The default as users read it, where its value does not tell."""
    singular: str
    """Of a list: the option's name, which may be repeated, and another key for the file."""
    variable: str
    """The environment variable, where it is not called like the key."""
    secret: bool
    """Its value is shown in no message."""
    table: bool
    """It is a table of the file, and no option."""


def setting(
    default: Any,
    help: str,
    panel: str = OTHER,
    metavar: str = "",
    *,
    shown: str | None = None,
    singular: str = "",
    variable: str = "",
    secret: bool = False,
    table: bool = False,
    **bounds: Any,
) -> Any:
    """A field that users can set. For `bounds` see `pydantic.Field`, for the rest `Setting`."""
    extra: Any = Setting(help, panel, metavar, shown, singular, variable, secret, table)
    return Field(default, json_schema_extra={"setting": extra}, **bounds)


def _read_size(value: str | int, info: ValidationInfo) -> int:
    try:
        return parse_bytes(value)
    except ConfigError as error:
        raise ConfigError(f"{info.field_name}: {error}") from error


Size = Annotated[int, BeforeValidator(_read_size)]
"""A number of bytes, given as `parse_bytes` reads it."""

KernelSet = Literal["auto", "native", "reference"]


class _Frozen(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False
    )


class PlanSettings(_Frozen):
    """Settings that `resolve` splits among the engines: the plan of each phase, and the workers."""

    plan: str | None = setting(
        None,
        "Formats of both phases: weights/cache, or weights=…,cache=…,head=…,page=…",
        FORMATS,
        "PLAN",
        shown=str(PrecisionPlan()).split()[0],
    )
    prefill: str | None = setting(
        None, "Formats of prefill, where they differ.", FORMATS, "PLAN", shown="--plan"
    )
    decode: str | None = setting(
        None, "Formats of decode, where they differ.", FORMATS, "PLAN", shown="--plan"
    )
    pools: str | None = setting(
        None,
        "Workers for prefill and for decode, each phase in its formats: 1p1d, 2p1d, …",
        POOLS,
        "NpMd",
        shown="one engine for both",
    )


class EngineConfig(_Frozen):
    """Everything the engine process needs. Sizes in bytes, lengths in tokens; 0 means derived."""

    model: Annotated[
        str,
        setting(
            ..., "A folder, a .gguf file, a Hugging Face id, or a built-in name (smollm2-135m)."
        ),
    ]
    plan: PrecisionPlan = PrecisionPlan()
    kernels: KernelSet = setting(
        "auto", "auto takes native ones where this machine has them.", FORMATS
    )
    threads: int = setting(
        0,
        "Threads of the kernels; 0 takes all cores that affinity and quota allow.",
        FORMATS,
        "N",
        ge=0,
        le=MAX_THREADS,
    )
    experts: Literal["memory", "mapped"] = setting(
        "memory",
        "mapped keeps experts in files and the used ones in memory, for models larger than it.",
        FORMATS,
    )
    expert_memory: Size = setting(
        0, "Memory for mapped experts; 0 leaves it to the system's page cache.", FORMATS, "SIZE"
    )
    cache_memory: Size = setting(2**30, "Memory for cached keys and values.", LIMITS, "SIZE")
    max_model_len: int = setting(
        0, "Longest context in tokens; 0 takes what the model allows.", LIMITS, "N", ge=0, lt=2**31
    )
    max_num_seqs: int = setting(64, "Requests computed at a time.", LIMITS, "N", ge=1, le=2**16)
    max_step_tokens: int = setting(
        2048, "Tokens of one step; longer prompts are cut.", LIMITS, "N", ge=1, le=2**20
    )
    max_waiting: int = setting(
        1024, "Requests that may wait; more get HTTP 429.", LIMITS, "N", ge=1, lt=2**31
    )
    integrity: bool = setting(True, "Check the tag of each page before and after each step.", CACHE)
    prefix_cache: bool = setting(
        True, "Prefix caching: reuse the pages of prompts that begin alike.", CACHE
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "Least severe lines to log."
    )

    @classmethod
    def of(cls, **values: Any) -> Self:
        """A configuration of values that a user gave; ConfigError names each that is wrong."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from error

    @field_validator("plan", mode="after")
    @classmethod
    def _one_pool(cls, plan: PrecisionPlan) -> PrecisionPlan:
        if plan.prefill.cache != plan.decode.cache:
            raise ConfigError(
                f"one process has one cache pool, so prefill cache={plan.prefill.cache} and decode "
                f"cache={plan.decode.cache} cannot differ; give both the same, or each phase a "
                "pool of its own with --pools 1p1d"
            )
        return plan


class TlsFiles(_Frozen):
    """Files in PEM form by which workers encrypt hand-offs; the same paths on every machine.

    Whoever connects trusts certificates of `ca` alone, under any name.
    """

    cert: str
    key: str
    ca: str

    @model_validator(mode="after")
    def _are_there(self) -> Self:
        for name in ("cert", "key", "ca"):
            if not Path(getattr(self, name)).is_file():
                raise ValueError(f"tls.{name}: {getattr(self, name)} is no file")
        return self


class PoolsConfig(_Frozen):
    """Workers of two pools on this host; those of prefill are configured as `ServerConfig.engine`.

    `on_worker_loss`: whether requests of a lost worker are sent through again, or end as errors.
    """

    prefill_workers: int = Field(ge=1, le=MAX_WORKERS)
    decode_workers: int = Field(ge=1, le=MAX_WORKERS)
    decode: EngineConfig
    transport: Literal["shm", "tcp"] = setting(
        "shm", "What pages travel by between workers.", POOLS
    )
    on_worker_loss: Literal["recompute", "fail"] = setting(
        "recompute", "Requests of a lost worker: send them through again, or fail.", POOLS
    )
    tls: TlsFiles | None = setting(
        None,
        "Files in PEM form by which workers encrypt hand-offs over tcp: cert, key, ca.",
        POOLS,
        shown="not encrypted",
        table=True,
    )

    @model_validator(mode="after")
    def _tls_has_a_use(self) -> Self:
        if self.tls is not None and self.transport != "tcp":
            raise ValueError("tls encrypts transport=tcp; shared memory leaves no machine")
        return self


class ServerConfig(_Frozen):
    """Everything the HTTP front end needs."""

    engine: EngineConfig
    pools: PoolsConfig | None = None
    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0 for all.", NETWORK, "ADDRESS")
    port: int = setting(
        8000,
        "Port to listen on; 0 takes a free one and shows it.",
        NETWORK,
        "N",
        variable="BIFOLIO_PORT_NUMBER",  # Kubernetes sets BIFOLIO_PORT for a service `bifolio`
        ge=0,
        le=65535,
    )
    api_keys: tuple[str, ...] = setting(
        (),
        "Key that clients must send; may be repeated. Other users of the machine can see "
        "options: the variable, with keys separated by spaces, is safer.",
        NETWORK,
        "KEY",
        singular="api_key",
        secret=True,
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "Host name that requests to a loopback address may use; may be repeated, * for any.",
        NETWORK,
        "NAME",
        shown="localhost and addresses; any with an API key",
        singular="allowed_host",
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "Origin of web pages that may use the server; may be repeated, * for any.",
        NETWORK,
        "ORIGIN",
        shown="none; pages of this machine with an API key",
        singular="cors_origin",
    )
    max_connections: int = setting(
        0,
        "Connections at a time; more get HTTP 503. 0: twice the queue, 4096 or more.",
        LIMITS,
        "N",
        ge=0,
        lt=2**31,
    )
    max_connections_per_address: int = setting(
        0,
        "Connections of one client address; more get HTTP 429. 0: half of all.",
        LIMITS,
        "N",
        ge=0,
        lt=2**31,
    )
    share_prefix_cache: bool = setting(
        False,
        "Share cached prefixes between API keys: faster, but timing tells what others asked.",
        CACHE,
    )
    admin_key: str = setting(
        "",
        "Lets `bifolio cluster` look at and change the workers of two pools.",
        NETWORK,
        "KEY",
        shown="no access",
        secret=True,
    )
    served_name: str = setting("", "Name of the model in the API.", NETWORK, "NAME", shown="MODEL")
    chat_template: str = setting(
        "", "A jinja2 file to use as chat template.", NETWORK, "FILE", shown="the model's"
    )
    generation_config: Literal["auto", "none"] = setting(
        "auto",
        "auto samples by the model's generation_config.json (or GGUF metadata) where a request "
        "leaves a parameter out.",
        NETWORK,
    )
    max_request_bytes: Size = setting(
        8 * 2**20, "Longest body of a request; more gets HTTP 413.", LIMITS, "SIZE"
    )
    drain_seconds: float = setting(
        30.0, "Time that open requests get when the server stops.", NETWORK, "SECONDS", ge=0
    )
    request_timeout: float | None = setting(
        None,
        "Most time for a request, queue included; its own `timeout` may be shorter.",
        LIMITS,
        "SECONDS",
        shown="no limit",
        gt=0,
    )

    @field_validator("host", "served_name", "chat_template", mode="after")
    @classmethod
    def _says_something(cls, value: str) -> str:
        if not value.strip():  # as of a shell's variable that is not set
            raise ValueError("it is empty; give a value, or leave it out")
        return value

    @field_validator("cors_origins", mode="after")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if not re.fullmatch(r"\*|[A-Za-z][A-Za-z0-9+.-]*://[^/?#\s]+/?", origin):
                raise ValueError(f"{origin!r}: expected * or SCHEME://HOST[:PORT]")
        return tuple(origin.removesuffix("/").lower() for origin in origins)

    @field_validator("allowed_hosts", mode="after")
    @classmethod
    def _are_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if not re.fullmatch(r"\*|[^\s:/*]+", host):
                raise ValueError(f"{host!r}: expected * or a name without a port")
        return tuple(host.lower() for host in hosts)

    @field_validator("api_keys", mode="after")
    @classmethod
    def _keep_out(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        if not all(key.strip() for key in keys):
            raise ValueError("an empty key lets everybody in; give a value, or leave it out")
        return keys

    @property
    def queue_size(self) -> int:
        """Requests that may run or wait at a time, in all workers."""
        if self.pools is None:
            return self.engine.max_waiting + self.engine.max_num_seqs
        waiting = self.engine.max_waiting * self.pools.prefill_workers
        return waiting + self.pools.decode.max_num_seqs * self.pools.decode_workers


def resolve(options: dict[str, Any], file: Path | None = None) -> ServerConfig:
    """Merge a TOML file (lower rank) and options into one frozen ServerConfig.

    Keys stand flat, as on the command line: `model`, `plan`, `prefill`, `decode`, `port`, …
    ConfigError names an unknown key or the value that cannot be read.
    """
    merged: dict[str, Any] = {}
    if file is not None:
        try:
            merged = parse_toml(read_text(file, pipe=True))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot read the configuration file {file}: {cause_of(error)}"
            ) from error
    given = {key: value for key, value in options.items() if value is not None}
    merged = _with_lists(merged) | _with_lists(given)
    _check_keys(merged, SETTINGS)
    if not merged.get("model"):
        raise ConfigError(
            "no model given; name one on the command line (`bifolio serve smollm2-135m`) or in the "
            'configuration file (model = "smollm2-135m")'
        )
    plan = PrecisionPlan.parse(*(_text(merged, key) for key in ("plan", "prefill", "decode")))
    engine = {key: merged.pop(key) for key in list(merged) if key in EngineConfig.model_fields}
    pools = {key: merged.pop(key) for key in ("pools", *PoolsConfig.model_fields) if key in merged}
    try:
        if "pools" in pools:
            return ServerConfig(**_two_pools(plan, engine, **pools), **merged)
        if pools:
            raise ConfigError(f"{next(iter(pools))} is about two pools: give pools=1p1d, too")
        return ServerConfig(engine=EngineConfig(plan=plan, **engine), **merged)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error


def resolve_engine(options: dict[str, Any]) -> EngineConfig:
    """The EngineConfig of one engine that computes both phases, from options as of `resolve`.

    `plan` may also be a PrecisionPlan. ConfigError names an unknown key or a wrong value.
    """
    _check_keys(options, {*EngineConfig.model_fields, *PlanSettings.model_fields} - {"pools"})
    plan = options.get("plan")
    if not isinstance(plan, PrecisionPlan):
        return resolve(options).engine
    engine = resolve(options | {"plan": None}).engine
    return EngineConfig(**(dict(engine) | {"plan": plan}))


def _settings(model: type[BaseModel]) -> Iterator[tuple[str, tuple[Setting, FieldInfo]]]:
    for key, info in model.model_fields.items():
        extra: Any = info.json_schema_extra
        if extra is not None:
            yield key, (extra["setting"], info)


SETTINGS = {
    key: setting
    for model in (PlanSettings, PoolsConfig, EngineConfig, ServerConfig)
    for key, setting in _settings(model)
}
"""What a configuration file may hold, by key; other ways to set it are derived from it."""


def variable_of(key: str) -> str:
    """The environment variable of a setting."""
    setting, _ = SETTINGS[key]
    return setting.variable or f"BIFOLIO_{(setting.singular or key).upper()}"


def default_text(setting: Setting, info: FieldInfo) -> str:
    """The default as users read it; empty where there is none."""
    if setting.shown is not None:
        return setting.shown
    match info.default:
        case bool(value):
            return "on" if value else "off"
        case int(value) if setting.metavar == "SIZE":
            return size_text(value)
        case float(value):
            return f"{value:g}"
        case int(value) | str(value):
            return str(value)
        case _:
            return ""


def _with_lists(given: dict[str, Any]) -> dict[str, Any]:
    """Keys as the options are called (`api_key`) as the lists that they stand for."""
    merged = dict(given)
    for many, (setting, _) in SETTINGS.items():
        one = setting.singular
        if not one or one not in given:
            continue
        if many in given:
            raise ConfigError(f'{one} and {many}: give one of them, such as {many} = ["…", "…"]')
        value = merged.pop(one)
        merged[many] = [value] if isinstance(value, str) else value
    return merged


def _check_keys(given: Collection[str], known: Collection[str]) -> None:
    """ConfigError names unknown keys, with the ones that may be meant or all that there are."""
    wrong = [key for key in given if key not in known]
    if not wrong:
        return
    near = {key: difflib.get_close_matches(key, sorted(known), 1) for key in wrong}
    named = [
        f"{key!r} (did you mean {near[key][0]!r}?)" if near[key] else repr(key) for key in wrong
    ]
    text = f"unknown configuration {'key' if len(wrong) == 1 else 'keys'} {', '.join(named)}"
    if not all(near.values()):
        text += f"; known keys: {', '.join(sorted(known))}"
    raise ConfigError(text)


def _two_pools(
    plan: PrecisionPlan, engine: dict[str, Any], pools: Any, **options: Any
) -> dict[str, Any]:
    """Configurations of both pools: each worker knows the plan of its own phase alone."""
    match = re.fullmatch(r"(\d{1,4})p(\d{1,4})d", pools) if isinstance(pools, str) else None
    counts = [int(number) for number in match.groups()] if match is not None else []
    if not counts or not all(1 <= count <= MAX_WORKERS for count in counts):
        raise ConfigError(
            f"pools: {pools!r} is not like 1p1d (1 to {MAX_WORKERS} prefill and decode workers)"
        )
    if not engine.get("threads"):
        engine = engine | {"threads": max(1, default_threads() // sum(counts))}
    prefill, decode = (PrecisionPlan(side, side, plan.page_size) for side in plan.sides)
    chunk = {"max_step_tokens": PREFILL_CHUNK} | engine
    return {
        "engine": EngineConfig(plan=prefill, **chunk),
        "pools": PoolsConfig(
            prefill_workers=counts[0],
            decode_workers=counts[1],
            decode=EngineConfig(plan=decode, **engine),
            **options,
        ),
    }


def _text(merged: dict[str, Any], key: str) -> str | None:
    value = merged.pop(key, None)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{key}: {value!r} is not a text such as 'int4:g32:a8/fp8'")
    return value


def _explain(error: ValidationError) -> str:
    """What is wrong with each value. Whole tables and secret keys are not shown."""
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        text = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown configuration key {key!r}; leave it out")
        elif item["type"] == "value_error" and isinstance(item["input"], dict):
            # It is about several keys at once, and names them.
            lines.append(text)
        elif item["type"] == "missing" or any(
            SETTINGS[part][0].secret for part in item["loc"] if part in SETTINGS
        ):
            lines.append(f"{key}: {text}")
        else:
            lines.append(f"{key}: {text} (got {item['input']!r})")
    return "; ".join(lines)
