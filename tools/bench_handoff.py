"""What a hand-off costs either side: processor time per prompt, bytes on the wire.

    python tools/bench_handoff.py [--tokens N] [--model …] [--threads N]
    python tools/bench_handoff.py --listen 10.9.0.2:7010     # the decode side, its own process
    python tools/bench_handoff.py --dial 10.9.0.2:7010       # the prefill side: wall time, MB/s

In one process both sides run in one thread by turns, over shared memory and TCP on this host; a
prompt that is computed already goes over in one piece. Times are those of the thread that polls
(and of the conversion's threads, if there are more: wall time then), the best of several: the
sender checks seals, converts and hashes, the receiver copies and hashes. In two processes the time
is that from the offer to the admission, for bf16 pages; `emulated_link.c` makes a slow network to
do it over. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import statistics
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bifolio.cache.manager import CacheManager
from bifolio.cache.page_pool import PagePool
from bifolio.checkpoint.token_ids import TokenIds
from bifolio.disagg.addresses import Listener, dial
from bifolio.disagg.handshake import STAGING_BYTES, handed_writer, page_shape
from bifolio.disagg.peer_connection import PeerConnection, close_all
from bifolio.disagg.protocol import PROTOCOL_VERSION, ModelFingerprint, Role, WorkerHello
from bifolio.disagg.receiver import HandoffReceiver, PromptReservations
from bifolio.disagg.sender import Delivered, HandoffSender
from bifolio.formats import CacheFormat
from bifolio.kernels.native import NativeOps
from bifolio.pages.kv_pool import KVPool
from bifolio.request import PrefillResult, Request, SamplingParams
from bifolio.scheduler.limits import SchedulerLimits
from bifolio.scheduler.scheduler import Scheduler
from bifolio.spec import PageSpec
from bifolio.spec.page import HEADER_FILL, HEADER_SEAL

MODELS = {"smollm2-135m": (30, 3, 64), "qwen2.5-0.5b": (24, 2, 64), "llama-3-8b": (32, 8, 128)}
PAIRS = (("bf16", "bf16"), ("bf16", "fp8"), ("bf16", "fp8:token"), ("fp8", "fp8"))
TRANSPORTS = ("shared memory", "tcp")
WRITER, ROUNDS, TRANSFERS = 7, 5, 20
VOCAB = 1 << 20


@dataclass(frozen=True)
class HandoffResult:
    transport: str
    codec: str
    wire_bytes_per_token: float
    prefill_ms: float
    decode_ms: float
    sender_gb_per_second: float
    """Read and written by the sender, which checks seals, converts and hashes."""

    def __str__(self) -> str:
        return (
            f"{self.transport:14} {self.codec:18} {self.wire_bytes_per_token:9,.0f} B/token   "
            f"prefill {self.prefill_ms:7.1f} ms ({self.sender_gb_per_second:.1f} GB/s)   "
            f"decode {self.decode_ms:7.1f} ms"
        )


def hello(role: Role, spec: PageSpec) -> WorkerHello:
    return WorkerHello(
        version=PROTOCOL_VERSION,
        role=role,
        boot_epoch=1,
        region="here",
        model=ModelFingerprint("c", "t", "w"),
        page=page_shape(spec),
        writer=WRITER if role is Role.PREFILL else 0,
        slots=max(8, STAGING_BYTES // spec.page_bytes) if role is Role.DECODE else 0,
        max_tokens=VOCAB,
    )


class PrefillBench:
    """A pool with the pages of one prompt, computed and sealed."""

    def __init__(self, ops: NativeOps, spec: PageSpec, tokens: int) -> None:
        self.ops, self.spec, self.tokens = ops, spec, tokens
        self.pool = KVPool(spec, spec.pages_for(tokens))
        cache = CacheManager(PagePool(self.pool.pages), spec.page_size, WRITER, WRITER)
        self.table = cache.open(array("I", range(tokens)), tokens, "", 0)
        cache.reserve(self.table, tokens)
        self.pool.tensor.random_(0x30, 0x40)
        self.pool.stamp(cache.pool.take_stamps())
        pages = self.table.page_ids
        self.pool.headers[pages, HEADER_FILL] = spec.page_size
        self.pool.headers[pages, HEADER_SEAL] = ops.seals(self.pool.tensor, pages, 64)

    def sender(self, sock: socket.socket) -> HandoffSender:
        return HandoffSender(
            PeerConnection(sock, hello(Role.PREFILL, self.spec)), self.pool, self.ops
        )

    def offer(self, sender: HandoffSender, name: str) -> None:
        """The whole prompt, computed already."""
        sampling = SamplingParams(max_tokens=8)
        request = Request(id=name, prompt_ids=list(range(self.tokens)), sampling=sampling)
        sender.offer(request, self.table)
        sender.finish(name, PrefillResult(token=1))


class DecodeBench:
    """A pool that lets go of each prompt as soon as it has come; nothing stays cached."""

    def __init__(self, ops: NativeOps, spec: PageSpec, tokens: int, writer: int = WRITER) -> None:
        self.spec = spec
        pool = KVPool(spec, spec.pages_for(tokens) + 1)
        pool.tensor.fill_(1)  # the memory is there before anything is measured
        cache = CacheManager(
            PagePool(pool.pages), spec.page_size, writer, WRITER, prefix_cache=False
        )
        self.scheduler = Scheduler(cache, SchedulerLimits(max_model_len=VOCAB))
        self.reservations = PromptReservations(
            self.scheduler, pool, ops, tokens=TokenIds(VOCAB), vocab=VOCAB, decode_writer=WRITER
        )
        self.scheduler.reserved = self.reservations

    def receiver(self, sock: socket.socket) -> HandoffReceiver:
        return HandoffReceiver(
            PeerConnection(sock, hello(Role.DECODE, self.spec)), self.reservations
        )

    def release(self, name: str) -> None:
        self.scheduler.abort(name)


def run(
    ops: NativeOps, specs: tuple[PageSpec, PageSpec], tokens: int, transport: str
) -> HandoffResult:
    """Hand the prompt over several times, both sides by turns."""
    source, target = specs
    prefill = PrefillBench(ops, source, tokens)
    decode = DecodeBench(ops, target, tokens, handed_writer(WRITER, source, target, b"", b""))
    sockets = connected(transport)
    sender, receiver = prefill.sender(sockets[0]), decode.receiver(sockets[1])
    while not (sender.ready and receiver.ready):
        sender.poll()
        receiver.poll()
    rounds = []
    for i in range(ROUNDS):
        prefill.offer(sender, str(i))
        rounds.append(_polled(sender, receiver, ops.threads))
        decode.release(str(i))
    close_all([sender.connection, receiver.connection])
    sent = target.page_bytes * target.pages_for(tokens)
    read = source.page_bytes * source.pages_for(tokens)
    near, far = (min(times) for times in zip(*rounds, strict=True))
    codec = f"{source.cache} > {target.cache}"
    return HandoffResult(transport, codec, sent / tokens, near, far, (read + sent) / near / 1e6)


def _polled(sender: HandoffSender, receiver: HandoffReceiver, threads: int) -> tuple[float, float]:
    """Milliseconds of either side until the hand-off is delivered."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    spent = [0.0, 0.0]
    delivered = False
    while not delivered:
        before = clock()
        events = sender.poll()
        between = clock()
        receiver.poll()
        spent[0] += between - before
        spent[1] += clock() - between
        delivered = any(isinstance(event, Delivered) for event in events)
    return spent[0] * 1e3, spent[1] * 1e3


def connected(transport: str) -> tuple[socket.socket, socket.socket]:
    """Prefill end and decode end of a new connection."""
    if transport == "shared memory":
        return socket.socketpair()
    listener = Listener("tcp:127.0.0.1:0")
    near = dial(listener.address)
    while (far := listener.accept()) is None:
        time.sleep(0.001)
    listener.close()
    return near, far


# ── two processes ────────────────────────────────────────────────────────────────────────────────


def wait(connection: PeerConnection | Listener) -> None:
    """As an engine that is busy with hand-offs waits."""
    if (file := connection.fileno()) >= 0:
        select.select([file], [], [], 0.005)


def serve(ops: NativeOps, spec: PageSpec, tokens: int, address: str) -> None:
    """The decode side: take hand-offs until the process is ended."""
    decode, listener = DecodeBench(ops, spec, tokens), Listener(address)
    print("listening", flush=True)
    while True:
        while (sock := listener.accept()) is None:
            wait(listener)
        receiver, admitted = decode.receiver(sock), 0
        while not receiver.connection.closed:
            receiver.poll()
            while admitted < receiver.stats.delivered:
                decode.release(str(admitted))
                admitted += 1
            wait(receiver.connection)


def transfers(ops: NativeOps, spec: PageSpec, tokens: int, address: str) -> dict[str, Any]:
    """The prefill side: milliseconds of the first hand-off of a connection, and of later ones."""
    prefill = PrefillBench(ops, spec, tokens)
    sender = prefill.sender(dial(address))
    while not sender.ready:
        assert not sender.connection.closed, sender.connection.reason
        sender.poll()
        wait(sender.connection)
    times = []
    for i in range(TRANSFERS):
        start = time.perf_counter()
        prefill.offer(sender, str(i))
        while not (events := sender.poll()):
            wait(sender.connection)
        assert isinstance(events[0], Delivered), events
        times.append(1e3 * (time.perf_counter() - start))
    close_all([sender.connection])
    median = statistics.median(times[1:])
    nbytes = spec.page_bytes * spec.pages_for(tokens)
    return {
        "first_ms": round(times[0], 1),
        "median_ms": round(median, 1),
        "best_ms": round(min(times), 1),
        "median_mb_per_second": round(nbytes / median / 1e3, 1),
    }


def measure(
    ops: NativeOps, model: str, tokens: int, page: int, transports: Sequence[str] = TRANSPORTS
) -> list[HandoffResult]:
    """Every pair of formats over every transport; lines for people on the way."""
    results = []
    for pair in PAIRS:
        one, other = (PageSpec(*MODELS[model], CacheFormat.parse(f), page) for f in pair)
        for transport in transports:
            results.append(run(ops, (one, other), tokens, transport))
            print(results[-1], flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", choices=list(MODELS))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--listen", metavar="HOST:PORT")
    parser.add_argument("--dial", metavar="HOST:PORT")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ops = NativeOps(args.threads)
    spec = PageSpec(*MODELS[args.model], CacheFormat.parse("bf16"), args.page)
    if args.listen:
        serve(ops, spec, args.tokens, f"tcp:{args.listen}")
    result: dict[str, Any] = {"model": args.model, "tokens": args.tokens}
    if args.dial:
        result |= transfers(ops, spec, args.tokens, f"tcp:{args.dial}")
    else:
        results = measure(ops, args.model, args.tokens, args.page)
        result["results"] = [asdict(one) for one in results]
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
