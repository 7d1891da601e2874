"""A fleet whose workers Ray has placed."""

from __future__ import annotations

import ray
from ray.util import get_node_ip_address

from bifolio.cluster.cluster_config import ClusterConfig, PoolResources
from bifolio.cluster.ray_launcher import RayLauncher
from bifolio.config import ServerConfig
from bifolio.disagg.fleet import Fleet, OnLoading
from bifolio.disagg.router import PoolRouter
from bifolio.errors import ConfigError


def connect(cluster: ClusterConfig) -> None:
    """Join the Ray cluster that the configuration names, or start one on this machine.

    ConfigError: it cannot be reached.
    """
    address = None if cluster.ray == "local" else cluster.ray
    try:
        ray.init(address=address, log_to_driver=False, include_dashboard=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"cluster.ray: {cluster.ray!r} cannot be joined ({error}); start it with `ray start "
            '--head`, give its address, or set ray = "local"'
        ) from error


def router_over(
    server: ServerConfig, cluster: ClusterConfig, on_loading: OnLoading | None = None
) -> PoolRouter:
    """A router, not started, over workers that Ray places. `connect` comes first."""
    pools = server.pools
    assert pools is not None, "a cluster has two pools"
    router = cluster.advertise or get_node_ip_address()

    def place(needs: PoolResources) -> RayLauncher:
        return RayLauncher(needs, router, cluster.start_seconds)

    fleet = Fleet(
        [server.engine] * pools.prefill_workers,
        [pools.decode] * pools.decode_workers,
        transport="tcp",
        tls=pools.tls,
        places=(lambda: place(cluster.prefill), lambda: place(cluster.decode)),
        on_loading=on_loading,
    )
    return PoolRouter(fleet, on_loss=pools.on_worker_loss)
