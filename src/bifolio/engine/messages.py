"""What the front end and the engine process say to each other, as msgpack.

    front → engine   Start · Submit · Abort · Shutdown · Listen · Connect · Disconnect
    engine → front   Loading · EngineInfo · Outputs · Refused · EngineStats · Fatal
                     Listening · PeerNews

The order of one request: Submit, then either one Refused, or one Output without news, which says
that the request is in line, and Outputs until one of them has a `finish`. After an Abort the engine
says nothing more about that request.

Engines that share the phases of a request between them are introduced by the front end: a decode
engine is told to Listen and answers where it does, a prefill engine is told to Connect there, and
PeerNews says what became of it.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from bifolio.request import Output, Request


class Start(msgspec.Struct, frozen=True, tag=True):
    """First message: build the engine with `factory` (`module:function`) from a configuration.

    `config` is an EngineConfig as JSON.
    """

    factory: str
    config: str


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A request to admit before the next step."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Requests to forget before the next step; unknown ids are ignored."""

    ids: list[str]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Close the engine and end the process."""


class Tls(msgspec.Struct, frozen=True):
    """Files in PEM form: who one is, and whom one trusts."""

    cert: str
    key: str
    ca: str


class Listen(msgspec.Struct, frozen=True, tag=True):
    """Decode engines: take connections of prefill engines that know `secret`.

    `where` is what the transports of `bifolio.disagg` listen on: `shm:NAME` or `tcp:HOST:PORT`.
    """

    where: str
    secret: bytes
    tls: Tls | None = None


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Prefill engines: there is a decode engine `name` at an address that Listening named."""

    name: str
    address: str
    secret: bytes
    tls: Tls | None = None


class Disconnect(msgspec.Struct, frozen=True, tag=True):
    """Prefill engines: nothing goes to decode engine `name` any more."""

    name: str


class Listening(msgspec.Struct, frozen=True, tag=True):
    """The answer to Listen: what to Connect to."""

    address: str


class PeerNews(msgspec.Struct, frozen=True, tag=True):
    """A connection of this prefill engine is ready, or has ended; `refused`: for good."""

    name: str
    ready: bool
    refused: bool = False
    reason: str = ""


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Progress of the start: `done` of `total` units (bytes, layers) of what `stage` names."""

    stage: str
    done: int
    total: int


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine is ready. Ids are valid below `vocab`, which may exceed the tokenizer's length;
    those without a token never come out.

    `stop_ids` are the end tokens that the checkpoint declares and the engine obeys. `pages` is
    the size of the pool; `plan`, `kernels` and `experts` (empty: in memory) are texts for people.
    `model_positions` is what the model itself allows as `max_model_len`, and `model_bytes` the
    cache memory that would take; 0: not known.
    """

    model: str
    vocab: int
    max_model_len: int
    stop_ids: tuple[int, ...]
    page_size: int
    pages: int
    page_bytes: int
    plan: str
    kernels: str
    boot_epoch: int
    experts: str = ""
    model_positions: int = 0
    model_bytes: int = 0


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """What one step brought, for all of its requests."""

    outputs: list[Output]


class RefusalKind(StrEnum):
    """Which error of the tree a refusal becomes in the front end."""

    REQUEST = "request"
    OVERLOADED = "overloaded"
    INTERNAL = "internal"


class Refused(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A request that was not admitted, with the fields of RequestError and OverloadedError."""

    id: str
    kind: RefusalKind
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float = 0.0


class HandoffStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Counters of hand-offs that this engine sent or received, since the start: one object counts.

    `failed` counts by cause. `nbytes` are those of page records on the wire, failed attempts
    included; `known_pages` were not sent, since the other side had them; `hidden_pages` of those
    sent left before their prompt was computed to its end. `exposed_seconds` pass between that and
    the admission elsewhere. `encode_seconds` went into checking, converting and digesting pages.
    `held_pages` are of `holds` transfers, `reserved_pages` set apart for `open` ones.
    """

    delivered: int = 0
    failed: dict[str, int] = {}
    open: int = 0
    peers: int = 0
    pages: int = 0
    hidden_pages: int = 0
    known_pages: int = 0
    nbytes: int = 0
    exposed_seconds: float = 0.0
    encode_seconds: float = 0.0
    held_pages: int = 0
    holds: int = 0
    reserved_pages: int = 0
    pages_lost: int = 0


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """The heartbeat: it passes through the loop that steps, so a hung step stops it.

    Gauges hold at that moment; the others count since the start. `progress` moves whenever any
    request got nearer to its end (tokens computed and tokens emitted). Prefix queries and hits
    are in tokens. `weight_bytes` are kept in memory, mapped experts are not among them.
    `integrity_failures` and `logits_faults` are requests that were ended, `seal_failures` pages
    whose bytes had changed, whether a request met them or not.
    """

    steps: int = 0
    progress: int = 0
    running: int = 0
    waiting: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_live: int = 0
    pages_quarantined: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    pages_checked: int = 0
    integrity_failures: int = 0
    logits_faults: int = 0
    seals_checked: int = 0
    seal_failures: int = 0
    weight_bytes: int = 0
    expert_bytes_mapped: int = 0
    expert_bytes_resident: int = 0
    handoff: HandoffStats | None = None


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """Last words of the engine process. `kind` is the name of the error's class."""

    kind: str
    message: str


FrontMessage = Start | Submit | Abort | Shutdown | Listen | Connect | Disconnect
EngineMessage = (
    Loading | EngineInfo | Outputs | Refused | EngineStats | Fatal | Listening | PeerNews
)
