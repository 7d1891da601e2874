"""Random hand-offs in random weather: what arrives is what was sent, and nothing is held for ever.

Each run checks by itself (`world.World`): no request is admitted with another result or other
bytes than were sent, none twice, and its pages are still the same when it ends; every request has
one end; at the end no page is held on either side; counts, flags and tables agree all along.
"""

from __future__ import annotations

import math
import random

import pytest
import structlog

from bifolio.disagg.protocol import Cause
from bifolio.disagg.receiver import PromptReservations
from support.faulty_wire import Fault, Weather
from support.handoff_world import Load, World

FORMATS = (("bf16", "bf16"), ("bf16", "fp8"), ("bf16", "fp8:token"), ("fp8", "bf16"))
RECORD_FAULTS = (Fault.FLIP, Fault.HALF, Fault.STALE, Fault.SWAP, Fault.LATE)
MESSAGE_FAULTS = (Fault.LOSS, Fault.DAMAGE, Fault.REPEAT)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))


def some_load(seed: int) -> Load:
    dice = random.Random(f"load {seed}")
    return Load(
        requests=dice.randrange(1, 6),
        slots=dice.randrange(1, 5),
        pages=(40, dice.choice((14, 24, 60))),
        formats=dice.choice(
            (("bf16", "bf16"), ("bf16", "fp8"), ("bf16", "fp8:token"), ("fp8", "bf16"))
        ),
        sizes=dice.choice(((16, 16), (16, 32), (32, 16))),
        aborts=dice.choice((0.0, 0.3)),
        deadline=dice.choice((math.inf, math.inf, 0.5)),
    )


def bad_records(seed: int) -> Weather:
    dice = random.Random(f"records {seed}")
    chances = {fault: dice.choice((0.0, 0.02, 0.1)) for fault in RECORD_FAULTS}
    return Weather(chances, delay=dice.choice((0.0, 0.02, 0.2)), ordered=dice.random() < 0.5)


def bad_messages(seed: int) -> Weather:
    dice = random.Random(f"messages {seed}")
    chances = {fault: dice.choice((0.0, 0.005, 0.02)) for fault in MESSAGE_FAULTS}
    return Weather(chances, delay=dice.choice((0.02, 0.2)), ordered=dice.random() < 0.5)


def sudden_death(seed: int) -> Weather:
    """At operation number `seed`, more or less: the handshake has a few, a whole run some 80."""
    dice = random.Random(f"death {seed}")
    return Weather(delay=dice.choice((0.0, 0.05)), dies_at=seed % 90, hangs=dice.random() < 0.3)


def everything(seed: int) -> Weather:
    dice = random.Random(f"everything {seed}")
    chances = {fault: dice.choice((0.0, 0.0, 0.02)) for fault in Fault}
    return Weather(
        chances,
        delay=dice.choice((0.0, 0.02, 0.2)),
        ordered=dice.random() < 0.5,
        dies_at=dice.choice((-1, -1, dice.randrange(120))),
        hangs=dice.random() < 0.3,
    )


WEATHERS = {w.__name__: w for w in (bad_records, bad_messages, sudden_death, everything)}


@pytest.mark.parametrize("weather", WEATHERS)
def test_whatever_happens_what_arrives_is_what_was_sent(weather: str) -> None:
    for seed in range(75):
        run(weather, seed)


@pytest.mark.soak
@pytest.mark.parametrize("weather", WEATHERS)
def test_whatever_happens_thousands_of_times(weather: str) -> None:
    for seed in range(1000, 4000):
        run(weather, seed)


def run(weather: str, seed: int) -> World:
    world = World(seed, WEATHERS[weather](seed), some_load(seed))
    try:
        world.run()
    except AssertionError as error:
        raise AssertionError(f"{error}\n{world.describe()}") from error
    return world


def clear_sky(first: int, count: int) -> None:
    for seed in range(first, first + count):
        dice = random.Random(f"clear {seed}")
        sizes = some_load(seed).sizes
        load = Load(slots=dice.randrange(1, 5), max_queue=4, pages=(80, 80), sizes=sizes)
        world = World(seed, Weather(delay=0.05), load)
        world.run()
        assert not world.failures(), world.describe()
        assert not world.decode.stats.failed
        assert len(world.admitted) == load.requests


def test_nothing_is_found_where_nothing_happens() -> None:
    clear_sky(0, 40)


@pytest.mark.soak
def test_no_false_alarm_in_a_thousand_clean_runs() -> None:
    clear_sky(10_000, 1000)


def test_bad_records_are_found_and_sent_again() -> None:
    chances = dict.fromkeys(RECORD_FAULTS, 0.05)
    found = retried = faults = 0
    for seed in range(40):
        world = World(seed, Weather(chances, delay=0.02), Load(pages=(80, 80)))
        world.run()
        found += world.decode.stats.failed.get(Cause.CORRUPT, 0)
        retried += len(world.admitted)
        faults += sum(world.wire.happened.values())
    assert found > 10
    assert retried > 100
    assert faults >= found


def test_the_runs_would_notice_a_receiver_that_trusts_what_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fill(self, reservation, records, page):
        self._pool.body(reservation.table.page_ids[page.index])[:] = records[page.slot, 64:]
        return True

    monkeypatch.setattr(PromptReservations, "fill", fill)
    with pytest.raises(AssertionError, match="other bytes than were sent"):
        for seed in range(90):
            run("bad_records", seed)


def test_the_runs_would_notice_a_receiver_that_forgets_a_reservation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PromptReservations, "release", lambda self, reservation: None)
    with pytest.raises(AssertionError):
        for seed in range(90):
            run("sudden_death", seed)
