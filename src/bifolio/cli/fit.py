"""Whether this machine has what a server is told to take, before minutes go into its model."""

from __future__ import annotations

import structlog

from bifolio.config import EngineConfig, ServerConfig, size_text
from bifolio.errors import ConfigError
from bifolio.machine import MachineLimits

log = structlog.get_logger("bifolio")


def check_fit(config: ServerConfig, limits: MachineLimits) -> None:
    """ConfigError for caches beyond the memory; more threads than cores are only pointed out."""
    engines = _engines(config)
    _check_memory(engines, limits)
    threads = max(engine.threads for engine in engines)
    if threads > limits.threads:
        log.warning(
            "more threads than cores only slow down",
            threads=threads,
            cores=limits.threads,
            cure=f"give at most --threads {limits.threads}, or leave it out",
        )


def _engines(config: ServerConfig) -> list[EngineConfig]:
    """One for each process."""
    pools = config.pools
    if pools is None:
        return [config.engine]
    return [config.engine] * pools.prefill_workers + [pools.decode] * pools.decode_workers


def _check_memory(engines: list[EngineConfig], limits: MachineLimits) -> None:
    known = [
        (size, whose)
        for size, whose in (
            (limits.memory_available, "this machine has free"),
            (limits.memory_left, "its control group has free"),
        )
        if size is not None
    ]
    if not known:
        return
    most, whose = min(known)
    asked = sum(engine.cache_memory for engine in engines)
    if asked > most:
        each = f" for each of {len(engines)} workers" if len(engines) > 1 else ""
        raise ConfigError(
            f"--cache-memory {size_text(engines[0].cache_memory)}{each} is beyond the "
            f"{most / 2**30:.1f}GiB of memory that {whose}; ask for less, with room for the weights"
        )
