"""What a machine does not have is refused or pointed out before a model is loaded."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from bifolio.cli import launch
from bifolio.cli.launch import check_fit
from bifolio.config import resolve
from bifolio.errors import ConfigError
from bifolio.machine import MachineLimits


def limits(**changes: Any) -> MachineLimits:
    fields = {
        "cores": 4,
        "cores_allowed": 2,
        "cpu_quota": None,
        "memory_total": 2**34,
        "memory_available": 2**33,
        "memory_limit": None,
        "memory_left": None,
    }
    return MachineLimits(**(fields | changes))


def check(machine: MachineLimits, **options: Any) -> None:
    check_fit(resolve({"model": "m"} | options), machine)


@pytest.mark.parametrize(
    ("machine", "options", "words"),
    [
        (
            limits(),
            {"cache_memory": "900GiB"},
            "--cache-memory 900GiB is beyond the 8.0GiB of memory that this machine has free; ask",
        ),
        (
            limits(memory_limit=4 * 2**30, memory_left=3 * 2**29),
            {"cache_memory": "2GB"},
            "--cache-memory 2GB is beyond the 1.5GiB of memory that its control group has free",
        ),
        (
            limits(),
            {"cache_memory": "6GiB", "pools": "2p1d"},
            "--cache-memory 6GiB for each of 3 workers is beyond the 8.0GiB",
        ),
    ],
)
def test_caches_beyond_the_memory_are_refused_with_both_sizes(
    machine: MachineLimits, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(machine, **options)
    assert str(caught.value).startswith(words)


def test_caches_that_fit_or_that_nobody_can_judge_are_taken() -> None:
    check(limits(), cache_memory="8GiB")
    check(limits(), cache_memory="2GiB", pools="2p1d")
    check(limits(memory_limit=2**32, memory_left=2**31), cache_memory="2GiB")
    check(limits(memory_available=None), cache_memory="900GiB")


@pytest.mark.parametrize(("threads", "said"), [(0, 0), (2, 0), (3, 1), (999, 1)])
@pytest.mark.parametrize("machine", [limits(), limits(cores_allowed=4, cpu_quota=2.5)])
def test_more_threads_than_cores_are_pointed_out(
    machine: MachineLimits, threads: int, said: int
) -> None:
    with capture_logs() as logs:
        check(machine, threads=threads)
    found = [e for e in logs if e["event"] == "more threads than cores only slow down"]
    assert len(found) == said
    for entry in found:
        assert (entry["log_level"], entry["threads"], entry["cores"]) == ("warning", threads, 2)
        assert "--threads 2" in entry["hint"]


def test_a_server_looks_before_it_looks_for_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "read_limits", limits)
    monkeypatch.setattr(launch.logs, "configure", lambda *_args, **_options: None)
    monkeypatch.setattr(launch.signal, "signal", lambda *_args: None)
    with pytest.raises(ConfigError, match="--cache-memory 900GiB is beyond"):
        launch.launch(resolve({"model": "no-such-model", "port": 0, "cache_memory": "900GiB"}))
