"""What the engine process does for an engine that works together with others.

The engines themselves are in `bifolio.disagg`; the loop of the process only lends them its time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from bifolio.engine.messages import Connect, Disconnect, Listen, Listening, Outputs, PeerNews


class Peers(Protocol):
    """An engine's connections to others. Called from the thread that steps the engine."""

    @property
    def poll_timeout(self) -> float:
        """Seconds until `poll` wants to be called although nothing is readable."""

    def files(self) -> Iterable[int]:
        """File descriptors that become readable when `poll` has something to do."""

    def take(self, message: Listen | Connect | Disconnect) -> None:
        """Do what the front end says."""

    def poll(self) -> list[Outputs | Listening | PeerNews]:
        """Take what peers say, send what is ready, never wait; news for the front end."""
