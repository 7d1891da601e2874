"""Two pools on a Ray cluster of several nodes on this machine: placed, lost, moved, added, removed.

Answers are compared with those of the same pools without Ray.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bifolio.cluster.cluster_config import ClusterConfig, PoolResources
from bifolio.config import PoolsConfig, ServerConfig
from bifolio.errors import EngineDeadError
from bifolio.text.tokenizer_files import load_text_side
from support.e2e_harness import serving_client, until
from support.pool_processes import config, pools
from support.tiny import tiny_config, write_model

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.timeout(1200), pytest.mark.filterwarnings("default")]

PLAN = ("fp8/bf16", "int4:g32/fp8")
KEY = {"Authorization": "Bearer secret"}
BODY = {"prompt": list(range(3, 80)), "max_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("tiny"), tiny_config("llama")))


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A head without processors, two nodes for prefill, two for decode."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    kinds = ("compute", "compute", "bandwidth", "bandwidth")
    cluster.kinds = [cluster.add_node(num_cpus=1, resources={kind: 1}) for kind in kinds]
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def needs(kind: str) -> PoolResources:
    return PoolResources(resources={kind: 1.0})


@asynccontextmanager
async def served(model: str, start_seconds: float = 300.0) -> AsyncIterator[Any]:
    from bifolio.cluster.deploy import router_over

    engine, decode = (config(model, side) for side in PLAN)
    server = ServerConfig(
        engine=engine,
        pools=PoolsConfig(prefill_workers=1, decode_workers=1, decode=decode),
        served_name="m",
        admin_key="secret",
    )
    cluster = ClusterConfig(
        start_seconds=start_seconds, prefill=needs("compute"), decode=needs("bandwidth")
    )
    router = router_over(server, cluster)
    await router.start()
    try:
        async with serving_client(router, server, load_text_side(Path(model))) as running:
            yield running
    finally:
        await router.stop()


async def answer(running: Any) -> str:
    response = await running.http.post("/v1/completions", json=BODY, timeout=300)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


async def test_workers_are_placed_lost_moved_added_and_removed(model: str, nodes: Any) -> None:
    async with pools(model, plan=PLAN) as local:
        expected = await answer(local)
    async with served(model) as running:
        fleet = running.engine.fleet
        assert await answer(running) == expected

        for name in ("p0", "d0"):  # a process ends: its actor starts another
            os.kill(fleet.member(name).engine.pid, signal.SIGKILL)
            assert await answer(running) == expected
        await until(lambda: [m.restarts for m in fleet.members] == [1, 1], 300)

        actor = fleet.member("d0").place._actor  # a machine is lost: Ray finds another
        ray.kill(actor)
        os.kill(fleet.member("d0").engine.pid, signal.SIGKILL)
        await until(lambda: fleet.member("d0").restarts == 2, 300)
        assert await answer(running) == expected

        added = await running.http.post("/admin/workers?pool=decode", headers=KEY, timeout=300)
        assert added.json() == {"name": "d1"}
        listed = (await running.http.get("/admin/workers", headers=KEY)).json()["workers"]
        assert [(w["name"], w["up"]) for w in listed] == [("p0", True), ("d0", True), ("d1", True)]
        await until(lambda: fleet.member("p0").peers == {"d0", "d1"}, 300)
        busy = [asyncio.create_task(answer(running)) for _ in range(6)]
        await asyncio.sleep(0.05)
        gone = await running.http.delete("/admin/workers/d0", headers=KEY, timeout=300)
        assert gone.status_code == 200
        assert set(await asyncio.gather(*busy)) == {expected}
        assert [member.name for member in fleet.members] == ["p0", "d1"]
        assert await answer(running) == expected

        refused = await running.http.delete("/admin/workers/d1", headers=KEY)
        assert refused.status_code == 400
        assert "last worker" in refused.text
        assert (await running.http.get("/admin/workers")).status_code == 401
    await until(lambda: ray.available_resources().get("CPU") == 4.0, 300)  # all is given back


async def test_a_cluster_without_room_is_named(model: str, nodes: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("test_ray_cluster.needs", lambda kind: PoolResources(cpus=64))
    with pytest.raises(EngineDeadError, match=r"no machine of the Ray cluster has .*64"):
        async with served(model, start_seconds=1.0):
            pass
