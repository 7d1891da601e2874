"""The file of `bifolio cluster up`: what `serve --config` takes, and a table `[cluster]`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from bifolio.config import ServerConfig, resolve
from bifolio.errors import ConfigError, cause_of
from bifolio.input_files import parse_toml, read_text


class PoolResources(BaseModel):
    """What Ray must reserve for each worker of a pool."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    cpus: int = Field(default=1, ge=1)
    """Whole processors; the worker's kernels run as many threads."""
    memory: int = Field(default=0, ge=0)
    """Bytes; 0: not accounted for."""
    resources: dict[str, float] = {}
    """Ray's custom resources, by which a pool is tied to a kind of machine."""

    @field_validator("resources")
    @classmethod
    def _custom(cls, value: dict[str, float]) -> dict[str, float]:
        taken = {"CPU", "GPU", "memory", "object_store_memory"} & set(value)
        if taken:
            raise ValueError(f"{min(taken)} is one of Ray's own resources; name another one")
        return value

    def bundle(self) -> dict[str, float]:
        """As Ray's placement groups take it."""
        memory = {"memory": float(self.memory)} if self.memory else {}
        return {"CPU": float(self.cpus), **memory, **self.resources}


class ClusterConfig(BaseModel):
    """Where the workers of both pools run."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    ray: str = "auto"
    """Address of a running Ray cluster; `auto`: the one of this machine, `local`: a new one."""
    advertise: str = ""
    """Address of this machine as workers reach it; empty: as Ray knows it."""
    start_seconds: float = Field(default=300.0, gt=0)
    """Longest wait for a machine with room for a worker."""
    prefill: PoolResources = PoolResources()
    decode: PoolResources = PoolResources()


def read_cluster(file: Path, options: dict[str, Any]) -> tuple[ServerConfig, ClusterConfig]:
    """Both configurations; `options` win over the file's. ConfigError names what is wrong.

    Pages travel by TCP, since workers need not share a machine. Each worker has the threads that
    were reserved for it.
    """
    try:
        content = parse_toml(read_text(file, pipe=True))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the cluster's file {file}: {cause_of(error)}") from error
    table = content.pop("cluster", {})
    if content.setdefault("transport", "tcp") != "tcp":
        raise ConfigError(f"{file}: transport: workers of a cluster use tcp")
    if "pools" not in content:
        raise ConfigError(f'{file}: pools is missing, such as pools = "1p1d"')
    if "threads" in content:
        raise ConfigError(f"{file}: threads: set cpus in [cluster.prefill] and [cluster.decode]")
    try:
        cluster = ClusterConfig.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in ("cluster", *first["loc"]))
        raise ConfigError(f"{file}: {where}: {first['msg']}") from error
    server = resolve(content | {key: v for key, v in options.items() if v is not None})
    return _with_threads(server, cluster), cluster


def _with_threads(server: ServerConfig, cluster: ClusterConfig) -> ServerConfig:
    pools = server.pools
    assert pools is not None, "read_cluster has asked for pools"
    decode = pools.decode.model_copy(update={"threads": cluster.decode.cpus})
    return server.model_copy(
        update={
            "engine": server.engine.model_copy(update={"threads": cluster.prefill.cpus}),
            "pools": pools.model_copy(update={"decode": decode}),
        }
    )
