"""Two engines reduced to their pools: pages are filled with noise instead of keys and values."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from bifolio.cache.manager import CacheManager, PageTable
from bifolio.cache.page_pool import PagePool
from bifolio.checkpoint.token_ids import TokenIds
from bifolio.disagg.codec import HandOffKernels, ReferenceHandOff
from bifolio.disagg.handshake import page_shape
from bifolio.disagg.protocol import PROTOCOL_VERSION, ModelFingerprint, Role, WorkerHello
from bifolio.disagg.receiver import PromptReservation, PromptReservations
from bifolio.disagg.token_planes import token_planes
from bifolio.formats import CacheFormat
from bifolio.kernels import native
from bifolio.pages.kv_pool import KVPool
from bifolio.request import PrefillResult, Request, SamplingParams
from bifolio.scheduler.limits import SchedulerLimits
from bifolio.scheduler.scheduler import Scheduler
from bifolio.spec import PageSpec
from bifolio.spec.page import HEADER_FILL, HEADER_SEAL

MODEL = ModelFingerprint("config", "tokenizer", "weights")
PREFILL_WRITER, DECODE_WRITER = 0xA, 0xB
VOCAB = 1024


def kernels() -> HandOffKernels:
    return native.NativeOps(1) if native.available() else ReferenceHandOff()


def tiny_spec(cache: str = "bf16", page_size: int = 16) -> PageSpec:
    return PageSpec(1, 1, 16, CacheFormat.parse(cache), page_size)


def make_request(name: str, prompt: list[int], salt: str = "", max_tokens: int = 8) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens)
    return Request(id=name, prompt_ids=prompt, sampling=sampling, cache_salt=salt)


@cache
def page_content(spec: PageSpec, tokens: tuple[int, ...]) -> np.ndarray:
    """Bytes of a page behind its header: finite numbers in every format.

    As in a model, those of a token follow from it and all before it, and from nothing else.
    """
    record = np.zeros((1, spec.page_bytes), np.uint8)
    planes = token_planes(spec, record)
    first = (len(tokens) - 1) // spec.page_size * spec.page_size
    for end in range(first + 1, len(tokens) + 1):
        rng = np.random.default_rng(hash(tokens[:end]) % 2**63)
        i = end - 1 - first
        for plane in planes:
            at = plane[0, i // 2, i % 2]
            at[...] = rng.integers(0x30, 0x40, at.shape, np.uint8)
    return record[0, 64:]


@dataclass
class PrefillPool:
    """Computes prompts into pages: the bytes of a page follow from its tokens."""

    spec: PageSpec
    pages: int
    ops: HandOffKernels
    tables: dict[str, PageTable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = KVPool(self.spec, self.pages)
        self.cache = CacheManager(
            PagePool(self.pages), self.spec.page_size, PREFILL_WRITER, DECODE_WRITER
        )

    def hello(self, **changes: Any) -> WorkerHello:
        return _hello(Role.PREFILL, self.spec, writer=PREFILL_WRITER, **changes)

    def open(self, request: Request) -> PageTable:
        ids = array("I", request.prompt_ids)
        table = self.cache.open(ids, len(ids), request.cache_salt, len(ids) - 1)
        assert self.cache.reserve(table, len(ids)), "the test's prefill pool is too small"
        self.pool.stamp(self.cache.pool.take_stamps())
        self.tables[request.id] = table
        return table

    def compute(self, request: Request, end: int) -> None:
        table, size = self.tables[request.id], self.spec.page_size
        end = max(end, table.computed)
        for i in range(table.computed // size, -(-end // size)):
            fill = min(size, end - i * size)
            page = table.page_ids[i]
            self.pool.body(page)[:] = self.content(request.prompt_ids[: i * size + fill])
            self.pool.headers[page, HEADER_FILL] = fill
            if fill == size:
                seal = self.ops.seals(self.pool.tensor, [page], 64)[0]
                self.pool.headers[page, HEADER_SEAL] = seal
        self.cache.advance(table, end)

    def content(self, tokens: list[int]) -> np.ndarray:
        """Bytes of the page whose last token is the last of `tokens`."""
        return page_content(self.spec, tuple(tokens))

    def release(self, request_id: str) -> None:
        self.cache.release(self.tables.pop(request_id))

    def check(self) -> None:
        self.cache.check_invariants(self.tables.values())


class RecordedReservations(PromptReservations):
    """Says to its pool what is admitted and what is withdrawn."""

    owner: DecodePool

    def admit(
        self, reservation: PromptReservation, request: Request, result: PrefillResult
    ) -> None:
        self.owner.on_admit(request, reservation.table, result)
        super().admit(reservation, request, result)
        self.owner.admitted[request.id] = (request, reservation.table, result)

    def withdraw(self, request_id: str) -> bool:
        running = super().withdraw(request_id)
        if running:
            del self.owner.admitted[request_id]
            self.owner.withdrawn.add(request_id)
        return running


@dataclass
class DecodePool:
    """Takes requests in and keeps them running until they are released."""

    spec: PageSpec
    pages: int
    ops: HandOffKernels
    admitted: dict[str, tuple[Request, PageTable, PrefillResult]] = field(default_factory=dict)
    on_admit: Callable[[Request, PageTable, PrefillResult], None] = lambda *admitted: None

    def __post_init__(self) -> None:
        self.withdrawn: set[str] = set()
        self.pool = KVPool(self.spec, self.pages)
        self.cache = CacheManager(PagePool(self.pages), self.spec.page_size, 1, DECODE_WRITER)
        limits = SchedulerLimits(max_model_len=4096)
        self.scheduler = Scheduler(self.cache, limits, clock=lambda: 0.0)
        self.reservations = RecordedReservations(
            self.scheduler,
            self.pool,
            self.ops,
            tokens=TokenIds(VOCAB),
            vocab=VOCAB,
            decode_writer=DECODE_WRITER,
        )
        self.reservations.owner = self
        self.scheduler.reserved = self.reservations

    def hello(self, slots: int = 4, **changes: Any) -> WorkerHello:
        return _hello(Role.DECODE, self.spec, slots=slots, **changes)

    def release(self, request_id: str) -> None:
        del self.admitted[request_id]
        self.scheduler.abort(request_id)

    def check(self) -> None:
        self.scheduler.check_invariants()


def _hello(role: Role, spec: PageSpec, **changes: Any) -> WorkerHello:
    fields: dict[str, Any] = {
        "version": PROTOCOL_VERSION,
        "role": role,
        "boot_epoch": 1,
        "region": "eu",
        "model": MODEL,
        "page": page_shape(spec),
        "writer": 0,
        "max_tokens": 4096,
    }
    return WorkerHello(**(fields | changes))
