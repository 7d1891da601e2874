"""Workers removed and replaced at the same time, by people who do not know of each other."""

import asyncio

import pytest

from bifolio.engine.messages import Disconnect, PeerNews
from bifolio.errors import ConfigError
from support.fake_workers import router_over


def no_script(_request_id, _request):
    return ()


@pytest.fixture
def fleet():
    fleet = router_over([no_script], [no_script] * 2).fleet
    for member in fleet.members:
        member.engine.open_requests = 1  # it has something to finish

        async def stop(engine=member.engine):
            engine.is_dead = True

        member.engine.stop = stop
        member.engine.send = lambda _message: None
    return fleet


def finish(fleet):
    for member in fleet.members:
        member.engine.open_requests = 0


async def test_two_removals_at_a_time_leave_one_worker(fleet):
    removing = asyncio.create_task(fleet.remove("d0"))
    await asyncio.sleep(0)
    with pytest.raises(ConfigError, match="d1 is the last worker of the decode pool"):
        await fleet.remove("d1")
    finish(fleet)
    await removing
    assert [member.name for member in fleet.decode] == ["d1"]
    assert fleet.decode[0].up


@pytest.mark.parametrize("change", ["remove", "replace"])
async def test_nothing_else_can_be_done_with_a_worker_that_is_being_removed(fleet, change):
    removing = asyncio.create_task(fleet.remove("d0"))
    await asyncio.sleep(0)
    with pytest.raises(ConfigError, match="d0 is being removed"):
        await getattr(fleet, change)("d0")
    finish(fleet)
    await removing


async def test_a_replacement_ends_when_its_worker_is_removed_meanwhile(fleet):
    replacing = asyncio.create_task(fleet.replace("d0"))
    await asyncio.sleep(0)
    removing = asyncio.create_task(fleet.remove("d0"))
    await asyncio.sleep(0)
    finish(fleet)
    await removing
    with pytest.raises(ConfigError, match="d0 is being removed"):
        await asyncio.wait_for(replacing, 60)


async def test_what_was_sent_a_moment_ago_is_waited_for(fleet):
    engine = fleet.member("d0").engine
    engine.open_requests = 0
    removing = asyncio.create_task(fleet.remove("d0"))
    asyncio.get_running_loop().call_soon(setattr, engine, "open_requests", 1)
    await asyncio.sleep(0.1)
    assert not removing.done()
    finish(fleet)
    await removing


async def test_nobody_connects_to_a_worker_that_is_about_to_end(fleet, monkeypatch):
    monkeypatch.setattr("bifolio.disagg.fleet._FIRST_BACKOFF", 0.0)
    sender, ending, told, stopped = fleet.prefill[0], fleet.member("d0"), [], asyncio.Event()
    sender.engine.send = told.append
    ending.address = "shm:somewhere"

    async def stop():
        fleet._on_news(sender, sender.engine, PeerNews("d0", ready=False, reason="it has gone"))
        stopped.set()

    ending.engine.stop = stop
    replacing = asyncio.create_task(fleet.replace("d0"))
    finish(fleet)
    await asyncio.wait_for(stopped.wait(), 60)
    await asyncio.sleep(0.02)
    assert told == [Disconnect("d0")]
    replacing.cancel()
    await asyncio.gather(replacing, return_exceptions=True)


async def test_wishes_for_new_workers_during_a_round_are_one_further_round(fleet):
    replaced, gate = [], asyncio.Event()

    async def replace(name):
        replaced.append(name)
        await gate.wait()

    fleet.replace = replace
    asking = [asyncio.create_task(fleet.replace_all()) for _ in range(5)]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*asking)
    await fleet.replace_all()
    assert replaced == ["p0", "d0", "d1"] * 3


async def test_a_worker_that_is_being_replaced_already_is_waited_for(fleet):
    member = fleet.member("d0")
    engine, member.engine = member.engine, None
    replacing = asyncio.create_task(fleet.replace("d0"))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not replacing.done()
    member.engine = engine
    await asyncio.wait_for(replacing, 60)
    assert member.up
