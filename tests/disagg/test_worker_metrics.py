"""What /metrics and a chat show of the workers behind one endpoint."""

from bifolio.cli.api_client import ChatAnswer
from bifolio.cli.console import figures_text
from bifolio.request import FinishReason
from bifolio.server.generation import Usage
from bifolio.server.server_metrics import ServerMetrics
from bifolio.stats import EngineStats, HandoffStats
from support.fake_workers import HANDOFF, router_over, tokens


def always(*items):
    return lambda request_id, request: items


async def test_each_worker_has_its_figures_and_a_lone_engine_none():
    router = router_over([always(HANDOFF)], [always(tokens(1, end=FinishReason.STOP))])
    one, other = (member.engine for member in router.fleet.members)
    one.stats = EngineStats(
        waiting=3,
        free_pages=5,
        logits_faults=1,
        handoff=HandoffStats(
            delivered=7,
            failed={"corrupt": 2},
            pages=10,
            hidden_pages=8,
            known_pages=4,
            nbytes=1000,
            exposed_seconds=0.5,
            open=1,
        ),
    )
    other.stats = EngineStats(
        running=2, logits_faults=2, reserved_pages=6, handoff=HandoffStats(delivered=7)
    )
    router.fleet.decode[0].restarts = 1
    router._resent["pages_lost"] = 9
    shown = ServerMetrics(router).text().decode().splitlines()
    for line in (
        "bifolio_logits_faults_total 3.0",
        'bifolio_worker_up{pool="prefill",worker="p0"} 1.0',
        'bifolio_worker_restarts_total{pool="decode",worker="d0"} 1.0',
        'bifolio_worker_requests{pool="prefill",state="waiting",worker="p0"} 3.0',
        'bifolio_worker_requests{pool="decode",state="running",worker="d0"} 2.0',
        'bifolio_worker_pages{pool="prefill",state="free",worker="p0"} 5.0',
        'bifolio_handoffs_total{result="delivered",worker="p0"} 7.0',
        'bifolio_handoffs_total{result="failed",worker="p0"} 2.0',
        'bifolio_handoff_failures_total{cause="corrupt",worker="p0"} 2.0',
        'bifolio_handoff_bytes_total{worker="p0"} 1000.0',
        'bifolio_handoff_pages_total{kind="exposed",worker="p0"} 2.0',
        'bifolio_handoff_pages_total{kind="known",worker="p0"} 4.0',
        'bifolio_handoff_hidden_ratio{worker="p0"} 0.8',
        'bifolio_handoff_exposed_seconds_total{worker="p0"} 0.5',
        'bifolio_handoff_open{pool="prefill",worker="p0"} 1.0',
        'bifolio_handoff_reserved_pages{pool="decode",worker="d0"} 6.0',
        'bifolio_requests_resent_total{cause="pages_lost"} 9.0',
        "bifolio_num_requests_waiting 3.0",
    ):
        assert line in shown, line
    one.is_dead = True
    shown = ServerMetrics(router).text().decode()
    assert 'bifolio_worker_up{pool="prefill",worker="p0"} 0.0' in shown


def test_an_answer_says_which_workers_it_came_from():
    usage = Usage(1, 2, workers=["p0 → d1", "p0 → d0"])
    assert usage.body()["workers"] == ["p0 → d1", "p0 → d0"]
    assert "workers" not in Usage(1, 2).body()
    fields = dict.fromkeys(ChatAnswer.__dataclass_fields__)
    answer = ChatAnswer(**fields | {"workers": ["p0 → d1"], "finish_reason": "stop"})
    assert figures_text(answer) == "by p0 → d1"
