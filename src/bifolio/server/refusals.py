"""What the HTTP front end turns away: counted by reason, and logged without flooding the log."""

from __future__ import annotations

import time
from dataclasses import dataclass

import structlog

from bifolio.server.server_metrics import ServerMetrics

log = structlog.get_logger(__name__)

LOG_SECONDS = 10.0
"""Least time between two lines about the same reason."""


@dataclass(slots=True)
class _Reason:
    count: int = 0
    """Since the last line."""
    client: str = ""
    request_id: str = ""
    logged_at: float = float("-inf")


class Refusals:
    """Turned-away requests and connections of one server."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._reasons: dict[str, _Reason] = {}

    def add(self, code: str | None, client: str, request_id: str) -> None:
        """Count one, `code` being that of its error; log it if the last line is long ago."""
        reason = code or "invalid_request"
        self._metrics.refused(reason)
        state = self._reasons.setdefault(reason, _Reason())
        state.count += 1
        state.client, state.request_id = client, request_id
        self._log(reason, state, time.monotonic())

    def flush(self) -> None:
        """Log what was counted and not logged, where the last line is long ago."""
        now = time.monotonic()
        for reason, state in self._reasons.items():
            if state.count:
                self._log(reason, state, now)

    def _log(self, reason: str, state: _Reason, now: float) -> None:
        if now - state.logged_at < LOG_SECONDS:
            return
        log.warning(
            "refused",
            reason=reason,
            count=state.count,
            client=state.client,
            request_id=state.request_id,
        )
        state.count, state.logged_at = 0, now
