"""Who is served next: tenants share by tokens, each tenant's requests are served in order.

Every tenant has an account of the tokens computed for it; the one with the lowest account goes
first. A clock of virtual time runs at the pace of an account whose owner always has something
waiting: by the tokens charged to anybody over the number of tenants that wait. A tenant that comes
back from having nothing waiting starts at that clock: it neither saves up a claim while it is away,
nor can an endless stream of new tenants keep one that waits from its turn, since they start ever
later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, KeysView, Mapping

from bifolio.scheduler.sequence import Sequence

MAX_OVERTAKEN = 64
"""Requests of other tenants, each within its share, that may pass one that does not fit."""


def has_place(taken: Mapping[str, int], tenant: str, places: int) -> bool:
    """Whether one more of a tenant is among the first `places` if these go round the tenants.

    `taken` counts what each tenant has. Every tenant gets one place, then every tenant that has
    more gets a second, and so on; of the last round, those of others come first.
    """
    own = taken.get(tenant, 0)
    before = sum(min(count, own + 1) for other, count in taken.items() if other != tenant)
    return own + before < places


class _Tenant:
    __slots__ = ("account", "members", "waiting")

    def __init__(self, account: float) -> None:
        self.account = account
        self.members = 0
        """Requests waiting or running."""
        self.waiting: deque[Sequence] = deque()


class FairQueue:
    """Waiting requests of all tenants, and the accounts of those that have any request."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._virtual = 0.0
        self._backlogged = 0
        """Tenants with a request waiting."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        for tenant in self._tenants.values():
            yield from tenant.waiting

    @property
    def tenants(self) -> KeysView[str]:
        """Tenants with a request waiting or running."""
        return self._tenants.keys()

    def waiting(self) -> dict[str, int]:
        """How many requests of each tenant wait."""
        return {name: len(tenant.waiting) for name, tenant in self._tenants.items()}

    def account(self, sequence: Sequence) -> float:
        """What a request's tenant has had."""
        return self._tenants[sequence.tenant].account

    def join(self, sequence: Sequence) -> None:
        """A new request waits after the others of its tenant."""
        tenant = self._tenants.get(sequence.tenant)
        if tenant is None:
            tenant = self._tenants[sequence.tenant] = _Tenant(self._virtual)
        elif not tenant.waiting:
            tenant.account = max(tenant.account, self._virtual)
        tenant.members += 1
        self._insert(tenant, len(tenant.waiting), sequence)

    def enter(self, sequence: Sequence) -> None:
        """A request of this tenant runs at once, without having waited."""
        tenant = self._tenants.get(sequence.tenant)
        if tenant is None:
            tenant = self._tenants[sequence.tenant] = _Tenant(self._virtual)
        tenant.members += 1

    def put_back(self, sequence: Sequence) -> None:
        """A preempted request waits before the others of its tenant, by arrival."""
        tenant = self._tenants[sequence.tenant]
        place = 0
        while place < len(tenant.waiting) and tenant.waiting[place].arrival < sequence.arrival:
            place += 1
        self._insert(tenant, place, sequence)

    def _insert(self, tenant: _Tenant, place: int, sequence: Sequence) -> None:
        self._backlogged += not tenant.waiting
        tenant.waiting.insert(place, sequence)
        self._size += 1

    def head(self, passed: Collection[str] = ()) -> Sequence | None:
        """The request to admit next, of a tenant not in `passed`; it stays in line."""
        waiting = [t for name, t in self._tenants.items() if t.waiting and name not in passed]
        if not waiting:
            return None
        return min(waiting, key=lambda t: (t.account, t.waiting[0].arrival)).waiting[0]

    def remove(self, sequence: Sequence) -> None:
        """Take a request out of the line; its tenant still counts it until `leave`."""
        tenant = self._tenants[sequence.tenant]
        tenant.waiting.remove(sequence)
        self._backlogged -= not tenant.waiting
        self._size -= 1

    def leave(self, sequence: Sequence) -> None:
        """A request that no longer waits has ended; a tenant without any is forgotten."""
        tenant = self._tenants[sequence.tenant]
        tenant.members -= 1
        if not tenant.members:
            del self._tenants[sequence.tenant]

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """Enter tokens planned for a request in its tenant's account; below 0: planned no more."""
        self._tenants[sequence.tenant].account += tokens
        self._virtual += tokens / max(1, self._backlogged)

    def check_invariants(self, running: dict[str, int]) -> None:
        """Assert sizes; `running` counts the running requests of each tenant."""
        assert self._size == sum(1 for _ in self)
        assert self._backlogged == sum(1 for t in self._tenants.values() if t.waiting)
        for name, tenant in self._tenants.items():
            assert tenant.members == len(tenant.waiting) + running.get(name, 0) > 0
            arrivals = [sequence.arrival for sequence in tenant.waiting]
            assert arrivals == sorted(arrivals), "a tenant's requests are out of order"
        assert set(running) <= set(self._tenants)
