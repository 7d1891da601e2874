"""Configuration: read once from options and an optional TOML file, frozen afterwards."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from bifolio.errors import ConfigError, cause_of
from bifolio.formats import PrecisionPlan
from bifolio.input_files import parse_toml, read_text
from bifolio.machine import default_threads

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
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    if not isinstance(text, str) or not match or match[2].lower() not in _UNITS:
        raise ConfigError(f"cannot read {text!r} as a size; write 256MiB, 2GB or a number of bytes")
    return round(float(match[1]) * _UNITS[match[2].lower()])


def size_text(count: int) -> str:
    """A number of bytes as users write it: what `parse_bytes` reads as the same number."""
    for unit in ("TiB", "GiB", "TB", "GB", "MiB", "MB", "KiB", "kB"):
        size = _UNITS[unit.lower()]
        if count >= size and count * 100 % size == 0:
            return f"{count / size:.2f}".rstrip("0").rstrip(".") + unit
    return str(count)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class EngineConfig(_Frozen):
    """Everything the engine process needs. Sizes in bytes, lengths in tokens; 0 means derived."""

    model: str
    plan: PrecisionPlan = PrecisionPlan()
    cache_memory: int = 2**30
    max_model_len: int = Field(default=0, ge=0)
    max_num_seqs: int = Field(default=64, ge=1)
    max_step_tokens: int = Field(default=2048, ge=1)
    max_waiting: int = Field(default=1024, ge=1)
    threads: int = Field(default=0, ge=0, le=1024)
    kernels: Literal["auto", "native", "reference"] = "auto"
    experts: Literal["memory", "mapped"] = "memory"
    expert_memory: int = 0
    integrity: bool = True
    prefix_cache: bool = True
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("cache_memory", "expert_memory", mode="before")
    @classmethod
    def _bytes(cls, value: str | int, info: ValidationInfo) -> int:
        try:
            return parse_bytes(value)
        except ConfigError as error:
            raise ConfigError(f"{info.field_name}: {error}") from error

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
    transport: Literal["shm", "tcp"] = "shm"
    on_worker_loss: Literal["recompute", "fail"] = "recompute"
    tls: TlsFiles | None = None

    @model_validator(mode="after")
    def _tls_has_a_use(self) -> Self:
        if self.tls is not None and self.transport != "tcp":
            raise ValueError("tls encrypts transport=tcp; shared memory leaves no machine")
        return self


class ServerConfig(_Frozen):
    """Everything the HTTP front end needs."""

    engine: EngineConfig
    pools: PoolsConfig | None = None
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    """Names that requests may give as `Host`, besides localhost and addresses; `*`: any."""
    cors_origins: tuple[str, ...] = ()
    """Origins of the pages that may use the server from a browser; `*`: any."""
    max_connections: int = Field(default=0, ge=0)
    """Open at a time; 0: twice what the queue holds, at least 4,096, as far as files allow."""
    max_connections_per_address: int = Field(default=0, ge=0)
    """Of one client address; 0: half of all."""
    share_prefix_cache: bool = False
    """Whether prompts sent with different keys may share pages of the cache."""
    admin_key: str = ""
    """Lets its owner look at and change the workers of two pools; empty: nobody."""
    served_name: str = ""
    chat_template: str = ""
    generation_config: Literal["auto", "none"] = "auto"
    """Whether the sampling that the model's files recommend is the default of requests."""
    max_request_bytes: int = 8 * 2**20
    drain_seconds: float = Field(default=30.0, ge=0)
    request_timeout: float | None = Field(default=None, gt=0)
    """Most seconds from the submission of a request to its last token; it may ask for less."""

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
    _check_keys(merged, _KEYS)
    if not merged.get("model"):
        raise ConfigError(
            "no model given; name one on the command line (`bifolio serve smollm2-135m`) or in the "
            'configuration file (model = "smollm2-135m")'
        )
    plan = PrecisionPlan.parse(*(_text(merged, key) for key in _PHASE_KEYS))
    engine = {key: merged.pop(key) for key in list(merged) if key in EngineConfig.model_fields}
    pools = {key: merged.pop(key) for key in _POOL_KEYS if key in merged}
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
    _check_keys(options, {*EngineConfig.model_fields, *_PHASE_KEYS})
    plan = options.get("plan")
    if not isinstance(plan, PrecisionPlan):
        return resolve(options).engine
    engine = resolve(options | {"plan": None}).engine
    return EngineConfig(**(dict(engine) | {"plan": plan}))


_POOL_KEYS = ("pools", "transport", "on_worker_loss", "tls")
_PHASE_KEYS = ("plan", "prefill", "decode")
_KEYS = {*EngineConfig.model_fields, *ServerConfig.model_fields, *_POOL_KEYS, *_PHASE_KEYS}
_KEYS -= {"engine"}


_LISTS = {"api_key": "api_keys", "cors_origin": "cors_origins", "allowed_host": "allowed_hosts"}
"""Options that may be repeated, and the list that each stands for."""


def _with_lists(given: dict[str, Any]) -> dict[str, Any]:
    """Keys as the options are called (`api_key`) as the lists that they stand for."""
    merged = dict(given)
    for one, many in _LISTS.items():
        if one not in given:
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
        elif item["type"] == "missing" or {"api_keys", "admin_key"} & set(item["loc"]):
            lines.append(f"{key}: {text}")
        else:
            lines.append(f"{key}: {text} (got {item['input']!r})")
    return "; ".join(lines)
