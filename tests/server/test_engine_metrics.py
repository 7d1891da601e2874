"""Every field of the heartbeat reaches /metrics, under the name that the documentation has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from bifolio.server.server_metrics import ServerMetrics
from bifolio.stats import EngineStats, HandoffStats, engine_metrics
from support.fake_workers import HANDOFF, router_over

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
FIELDS = [name for name in EngineStats.__struct_fields__ if name != "handoff"]


def shown(stats: EngineStats) -> dict[str, float]:
    engine = SimpleNamespace(
        stats=stats,
        open_requests=0,
        hello=SimpleNamespace(pages=5, page_size=16),
        workers=lambda: (),
        restarts=0,
    )
    lines = ServerMetrics(engine).text().decode().splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in samples}


def test_every_field_has_a_metric_with_its_value() -> None:
    stats = EngineStats(**{name: 1000 + i for i, name in enumerate(FIELDS)})
    samples = shown(stats)
    fields = set()
    for field, spec in engine_metrics():
        label = f'{{{spec.label[0]}="{spec.label[1]}"}}' if spec.label else ""
        name = f"bifolio_{spec.name}{'_total' if spec.counter else ''}{label}"
        assert samples[name] == getattr(stats, field), name
        fields.add(field)
    assert fields == set(FIELDS)


def test_every_metric_is_documented_with_its_text() -> None:
    text = DOCUMENT.read_text()
    for _, spec in engine_metrics():
        name = f"`bifolio_{spec.name}{'_total' if spec.counter else ''}"
        lines = [line for line in text.splitlines() if line.startswith(f"| {name}")]
        assert any(spec.help in line for line in lines), name


def test_a_heartbeat_arrives_as_it_was_sent() -> None:
    stats = EngineStats(
        **{name: 1 + i for i, name in enumerate(FIELDS)},
        handoff=HandoffStats(delivered=7, failed={"corrupt": 2}, encode_seconds=0.5),
    )
    sent = msgspec.msgpack.encode(stats)
    assert msgspec.msgpack.decode(sent, type=EngineStats) == stats


@pytest.mark.parametrize("field", HandoffStats.__struct_fields__)
def test_every_field_of_a_hand_off_changes_a_metric(field: str) -> None:
    router = router_over([lambda *_: [HANDOFF]], [lambda *_: []])
    engine = router.fleet.prefill[0].engine
    counts = HandoffStats(pages=10)
    engine.stats = EngineStats(handoff=counts)
    before = ServerMetrics(router).text()
    value = {"cause": 3} if field == "failed" else 20
    engine.stats = EngineStats(handoff=msgspec.structs.replace(counts, **{field: value}))
    assert ServerMetrics(router).text() != before
