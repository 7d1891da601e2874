"""What a prefill worker and a decode worker say to each other, as msgpack (`docs/handoff.md`).

    both ways          WorkerHello · Ready · Refuse · AbortTransfer · Heartbeat · Bye
    prefill → decode   Offer · PageMessage · Finish · Settled
    decode → prefill   Grant · Accept · Decline · Admitted

The order of one hand-off: Offer, then Accept or Decline; PageMessage for each page that the
decode side lacks, while later ones are still computed; Finish once the first token is sampled;
Admitted; Settled. Either side may send AbortTransfer at any moment in between, and the transfer is
over for both.

Slots. The decode side owns a staging area of `slots` records. Grant gives slots to the prefill
side, which writes one record into each and gives it back with the PageMessage that names it. A
slot belongs to exactly one side at any moment, so no record is ever written over another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from bifolio.request import PrefillResult, Request

PROTOCOL_VERSION = 2
"""Raised when one side would misunderstand the other. That is not so of a field with a default that
nothing is lost without: unknown ones are ignored."""


class Role(StrEnum):
    """Which half of a request's life a worker serves."""

    PREFILL = "prefill"
    DECODE = "decode"


class Cause(StrEnum):
    """Why a hand-off did not happen; `Failed` events, aborts and the metrics carry it."""

    CANCELLED = "cancelled"
    """The client, or the engine on its behalf, ended the request."""
    DEADLINE = "deadline"
    """The request's own deadline has passed."""
    OVERLOADED = "overloaded"
    """The decode side has no room and a full queue."""
    REJECTED = "rejected"
    """The decode side can never serve this request."""
    STALLED = "stalled"
    """The peer lives but has not moved this transfer on for too long."""
    CORRUPT = "corrupt"
    """What arrived is not what the digests say."""
    SOURCE = "source"
    """A page of the sender did not carry its tag or its seal any more."""
    PEER_LOST = "peer_lost"
    """The connection ended, or fell silent."""
    PROTOCOL = "protocol"
    """The peer broke the rules of this protocol."""
    INTERNAL = "internal"
    """A mistake of ours on one of the two sides."""


class ModelFingerprint(msgspec.Struct, frozen=True):
    """What must be equal for two workers to serve one model.

    `weights` is the digest of the source model, not of a format that it is kept in: int4 and fp8
    weights made from the same checkpoint are a pair. Hex digests.
    """

    config: str
    tokenizer: str
    weights: str


class PageShape(msgspec.Struct, frozen=True, kw_only=True):
    """A PageSpec on the wire; `fingerprint` is the sender's, and must follow from the rest."""

    layers: int
    kv_heads: int
    head_dim: int
    cache: str
    page_size: int
    rank: int
    world: int
    kv_lora: int = 0
    rope: int = 0
    index_dim: int = 0
    index_layers: tuple[int, ...] = ()
    fingerprint: str


class WorkerHello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message of both sides. Nothing else is read before both have been compared."""

    version: int
    role: Role
    boot_epoch: int
    """A random number of this process: the same name with another epoch is another worker."""
    region: str
    """Where prompts of this worker may be kept; unequal labels refuse each other."""
    model: ModelFingerprint
    page: PageShape
    writer: int
    """Prefill: fingerprint of what writes the pages of prompts, in its own format. Decode: 0."""
    scales: bytes = b""
    """Static scales of an `fp8` cache, little-endian float32 [2, layers, kv_heads] (K, then V);
    empty where there are none. The prefill side encodes with those of the decode side."""
    slots: int = 0
    """Decode: records in its staging area."""
    max_tokens: int = 0
    """Most tokens, prompt and answer together, of a request."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The peer's WorkerHello is one to work with."""

    codec: str
    """Name of the conversion that this side has worked out; both must say the same."""


class Refuse(msgspec.Struct, frozen=True, tag=True):
    """These two cannot work together; the text says why, and nothing follows."""

    reason: str


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request whose prompt is being computed. `transfer` is never used twice on a connection."""

    transfer: int
    request: Request
    deadline: float
    """Seconds from now within which the request must have ended; infinity if it has no limit.

    The timeout of `request` itself is None: this is what is left of it.
    """


class Accept(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Room is kept. The first `known` of the `pages` logical pages are there and not to be sent.

    Logical pages are those of the decode side's page size.
    """

    transfer: int
    known: int
    pages: int


class Decline(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """No room is kept and nothing is held."""

    transfer: int
    cause: Cause
    message: str
    param: str | None = None
    retry_after: float = 0.0


class Grant(msgspec.Struct, frozen=True, tag=True):
    """Staging slots that now belong to the prefill side."""

    slots: list[int]


class PageMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Logical page `index` has landed whole in `slot`, which is the decode side's again.

    `fill` is its number of tokens, `digest` XXH3-64 of the record after its header, in the decode
    side's format, slots beyond `fill` being zero.
    """

    transfer: int
    index: int
    slot: int
    fill: int
    digest: int


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The prompt is computed and all pages are sent: what else there is, and the root digest.

    A grammar is in the request, and its state is that of replaying the first token, which the
    decode side does once. Text and stop strings are the front end's, which hears of the first
    token from the decode side, like of any other.
    """

    transfer: int
    result: PrefillResult
    root: bytes
    """BLAKE2b-128 over the whole document (`root_digest`)."""


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """All pages and the root are proven, and the request is the decode side's from now on."""

    transfer: int


class Settled(msgspec.Struct, frozen=True, tag=True):
    """The prefill side knows that the request was admitted, and has let go of it.

    Until then it may have given the transfer up: if an AbortTransfer comes instead, or the
    connection ends, the decode side ends the request, since it may be computed elsewhere by now.
    """

    transfer: int


class AbortTransfer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This transfer is over. An answer is neither needed nor sent; unknown ids are ignored."""

    transfer: int
    cause: Cause
    message: str = ""


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """A sign of life. `busy` are transfers that wait for this side's own work or memory."""

    busy: list[int]


class Bye(msgspec.Struct, frozen=True, tag=True):
    """This side closes the connection on purpose; `reason` is for the log."""

    reason: str


Message = (
    WorkerHello
    | Ready
    | Refuse
    | Offer
    | Accept
    | Decline
    | Grant
    | PageMessage
    | Finish
    | Admitted
    | Settled
    | AbortTransfer
    | Heartbeat
    | Bye
)

_encode = msgspec.msgpack.Encoder().encode


def root_digest(
    agreement: str,
    transfer: int,
    request: Request,
    known: int,
    pages: Sequence[tuple[int, int]],
    result: PrefillResult,
) -> bytes:
    """BLAKE2b-128 of everything that is handed over, in the msgpack of these values as a list.

    `agreement` names the pair of page specs and the codec (`handshake.Agreement.name`); `pages`
    are (fill, digest) of the logical pages from `known` on, in order. Both sides compute it, the
    sender from what it sent, the receiver from what it has proven: equal digests, equal documents.
    """
    body = _encode([agreement, transfer, request, known, pages, result])
    return hashlib.blake2b(body, digest_size=16).digest()
