"""Places for engine processes that Ray finds: a placement group and an actor for each worker."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from typing import Any

import ray
import structlog
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from bifolio.cluster.actor import AuthenticatedListener, EngineHost
from bifolio.cluster.cluster_config import PoolResources
from bifolio.errors import EngineDeadError
from bifolio.process.launcher import Process

log = structlog.get_logger(__name__)

_TRIES = 3
_START_SECONDS = 30.0
_KILL_SECONDS = 5.0
_ANSWER_SECONDS = 1.0
_THREADS = 4  # of an actor: while one waits for the process's end, another can kill it


class RayLauncher:
    """Room for one worker, wherever there is some.

    A process that ended is started again by the same actor. Where the actor is gone with its
    machine, the next start asks Ray for other room.
    """

    def __init__(self, needs: PoolResources, router: str, start_seconds: float) -> None:
        self._needs = needs
        self._router = router
        self._start_seconds = start_seconds
        self._group: PlacementGroup | None = None
        self._actor: Any = None
        self._host = ""

    @property
    def host(self) -> str:
        """See `Place.host`: the machine's address, as Ray knows it."""
        assert self._host, "start() comes first"
        return self._host

    async def start(self) -> tuple[socket.socket, Process]:
        """See `Place.start`."""
        reason: Exception | None = None
        for _ in range(_TRIES):
            try:
                if self._actor is None:
                    await self._find_room()
                return await self._start_process()
            except (RayError, OSError) as error:
                reason = error
                log.warning("a place is lost", host=self._host, reason=str(error).split("\n")[0])
                self.give_up()
        raise EngineDeadError(f"Ray could not start a worker: {reason}") from reason

    async def _find_room(self) -> None:
        """An actor on a machine with room, whose address is known then."""
        bundle = self._needs.bundle()
        self._group = placement_group([bundle], strategy="PACK")
        try:
            await asyncio.wait_for(self._group.ready(), self._start_seconds)
        except TimeoutError:
            self.give_up()
            raise EngineDeadError(
                f"no machine of the Ray cluster has {bundle} free; ask for less or add machines"
            ) from None
        options: dict[str, Any] = {
            "num_cpus": self._needs.cpus,
            "resources": self._needs.resources or None,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group),
            "max_concurrency": _THREADS,
        }
        self._actor = ray.remote(EngineHost).options(**options).remote()
        self._host = await self._actor.address.remote()

    async def _start_process(self) -> tuple[socket.socket, Process]:
        listener = AuthenticatedListener(self._router)
        accepted = asyncio.create_task(asyncio.to_thread(listener.accept, _START_SECONDS))
        try:
            pid = await self._actor.start.remote(self._router, listener.port, listener.key)
            return await accepted, RayProcess(self._actor, pid)
        finally:
            if not accepted.done():
                listener.close()
                await asyncio.gather(accepted, return_exceptions=True)

    def give_up(self) -> None:
        """Return what Ray has reserved, and end what runs there."""
        if self._actor is not None:
            ray.kill(self._actor)
        if self._group is not None:
            remove_placement_group(self._group)
        self._actor, self._group = None, None


class RayProcess:
    """An engine process behind an actor. Implements `Process`; may be waited for in a thread."""

    def __init__(self, actor: Any, pid: int) -> None:
        self._actor = actor
        self.pid = pid
        """On its own machine."""

    def kill(self) -> None:
        """See `Process.kill`."""
        self._actor.kill.remote()

    def wait(self, timeout: float | None = None) -> int:
        """See `Process.wait`; -1 if the actor is gone: its process ends with its channel."""
        seconds = _KILL_SECONDS if timeout is None else timeout
        try:
            status = ray.get(self._actor.wait.remote(seconds), timeout=seconds + _ANSWER_SECONDS)
        except RayError:
            return -1
        if status is None:
            raise subprocess.TimeoutExpired("engine", seconds)
        return int(status)
