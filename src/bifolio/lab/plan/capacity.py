"""What fits: bytes of weights and of cache on one rank, tokens, requests.

One rule for memory on every device and model: weights and cache share MEMORY_SHARE of the
device's memory; the rest is for activations, workspaces, graphs, communication buffers and the
runtime.
"""

from __future__ import annotations

from dataclasses import dataclass

from bifolio.errors import ConfigError
from bifolio.formats import CacheFormat, PhasePlan
from bifolio.lab.plan.hardware import Device
from bifolio.lab.plan.storage import Storage, planned
from bifolio.spec import ModelSpec, PageSpec
from bifolio.spec.weights import Kind

MEMORY_SHARE = 82
"""Percent of device memory for weights and cache.

The single free number of the capacity model. 81.6 to 82.2 would reproduce every published token
count within 3 % as well; see docs/plan.md.
"""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model as a checkpoint stores it, on `tp` devices that share every layer."""

    model: ModelSpec
    stored: Storage
    device: Device
    tp: int = 1
    memory_share: int = MEMORY_SHARE
    page_size: int = 64

    @property
    def usable_bytes(self) -> int:
        """Bytes of one device for weights and cache."""
        return self.device.memory_bytes * self.memory_share // 100

    def storage(self, phase: PhasePlan) -> Storage:
        return planned(self.model, phase, self.stored)

    def pages(self, cache: CacheFormat) -> PageSpec:
        """Pages of one rank; a latent stands on every rank, KV heads are cut."""
        return PageSpec.of(self.model, cache, self.page_size, 0, self.tp)

    def weight_bytes(self, phase: PhasePlan) -> dict[Kind, int]:
        """Bytes of each kind of weight on one device.

        Of a checkpoint on disk and one device they are those that `bifolio serve` holds, of other
        models those of the formats themselves.
        """
        storage = self.storage(phase)
        if storage.checkpoint is not None and self.tp == 1:
            return storage.checkpoint.nbytes(dict(storage.formats))
        return storage.nbytes(storage.served(self.model), self.tp)

    def checkpoint_bytes(self, phase: PhasePlan) -> int:
        """Bytes of a checkpoint in these formats, multi-token-prediction layers included."""
        storage = self.storage(phase)
        served, mtp = storage.served(self.model), storage.mtp(self.model)
        return sum(storage.nbytes(served).values()) + sum(storage.nbytes(mtp).values())


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one phase of a plan keeps on one device. `cache_bytes` is what is left for pages."""

    weights: dict[Kind, int]
    cache_bytes: int
    page: PageSpec

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def mappable_bytes(self) -> int:
        """Bytes of weights that `--experts mapped` keeps in files: those of routed experts."""
        return self.weights.get(Kind.ROUTED_EXPERTS, 0)

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights that must be in memory, wherever the experts are."""
        return self.weight_bytes - self.mappable_bytes

    @property
    def tokens(self) -> int:
        """Tokens that the pages hold; every rank holds the same ones."""
        return self.page.pages_in(self.cache_bytes) * self.page.page_size

    def requests(self, context: int) -> int:
        """Requests of `context` tokens each whose pages fit at once."""
        return self.page.pages_in(self.cache_bytes) // self.page.pages_for(context)


def capacity(deployment: Deployment, phase: PhasePlan) -> Capacity:
    """What one phase keeps on one device. ConfigError if the weights leave no room for a page."""
    weights = deployment.weight_bytes(phase)
    left = deployment.usable_bytes - sum(weights.values())
    room = Capacity(weights, left, deployment.pages(phase.cache))
    if left < room.page.page_bytes:
        raise ConfigError(
            f"the weights take {room.weight_bytes:,} B on each of {deployment.tp} × "
            f"{deployment.device.name}, which has {deployment.usable_bytes:,} B for them and the "
            f"cache ({deployment.memory_share} % of its memory); use more devices (--tp) or "
            f"smaller formats (--plan){_or_mapped(room)}"
        )
    return room


def _or_mapped(room: Capacity) -> str:
    if not room.mappable_bytes:
        return ""
    return (
        f"; on processors `bifolio serve --experts mapped` needs {room.resident_bytes:,} B of them "
        "in memory, the rest in files"
    )
