"""The cluster's file: a server's configuration, and what Ray must reserve for each worker."""

from pathlib import Path

import pytest

from bifolio.cluster.cluster_config import read_cluster
from bifolio.errors import ConfigError

GOOD = """
model = "m"
pools = "2p1d"
prefill = "fp8/bf16"
decode = "int4:g32/fp8"

[cluster]
ray = "local"

[cluster.prefill]
cpus = 8
resources = { compute = 1.0 }
"""


def read(folder: Path, text: str, **options):
    file = folder / "cluster.toml"
    file.write_text(text)
    return read_cluster(file, options)


def test_each_worker_gets_the_threads_that_are_reserved_for_it(tmp_path: Path) -> None:
    server, cluster = read(tmp_path, GOOD, port=7)
    assert server.pools is not None
    assert (server.engine.threads, server.pools.decode.threads) == (8, 1)
    assert (server.pools.prefill_workers, server.pools.decode_workers) == (2, 1)
    assert (server.pools.transport, server.port, cluster.ray) == ("tcp", 7, "local")
    assert cluster.prefill.bundle() == {"CPU": 8.0, "compute": 1.0}
    assert cluster.decode.bundle() == {"CPU": 1.0}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (('pools = "2p1d"', ""), "pools is missing"),
        (('pools = "2p1d"', 'pools = "2p1d"\ntransport = "shm"'), "transport"),
        (('pools = "2p1d"', 'pools = "2p1d"\nthreads = 3'), "cpus"),
        (("cpus = 8", "cpu = 8"), "cluster.prefill.cpu"),
        (("compute = 1.0", "memory = 1.0"), "Ray's own"),
        (("cpus = 8", "cpus = 0"), "cluster.prefill.cpus"),
        (('model = "m"', "model ="), "cannot read"),
        (('decode = "int4:g32/fp8"', 'decode = "int3/fp8"'), "int3"),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, change: tuple[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read(tmp_path, GOOD.replace(*change))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        read_cluster(tmp_path / "nowhere.toml", {})
