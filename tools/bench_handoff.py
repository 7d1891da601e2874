"""What a hand-off costs either side: processor time per prompt, bytes on the wire.

    python tools/bench_handoff.py [--tokens N] [--model …] [--threads N]

Both sides run in one thread by turns, over memory, shared memory and TCP on this host; a prompt
that is computed already goes over in one piece. Times are those of the thread that polls (and of
the conversion's threads, if there are more: wall time then), the best of several: the sender checks
seals, converts and hashes, the receiver copies and hashes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

from bifolio.cache.manager import CacheManager, PageTable
from bifolio.cache.page_pool import PagePool
from bifolio.disagg.handshake import handed_writer, page_shape
from bifolio.disagg.link import Link
from bifolio.disagg.pool_sink import PoolReservation, PoolSink
from bifolio.disagg.pool_source import PoolSource
from bifolio.disagg.protocol import PROTOCOL_VERSION, ModelFingerprint, Role, WorkerHello
from bifolio.disagg.receiver import HandoffReceiver
from bifolio.disagg.sender import Delivered, HandoffSender
from bifolio.disagg.shared_memory import SharedMemory
from bifolio.disagg.tcp import Network
from bifolio.disagg.transport import Transport, loopback
from bifolio.formats import CacheFormat
from bifolio.kernels.native import NativeOps
from bifolio.pages.kv_pool import KVPool
from bifolio.request import PrefillResult, Request, SamplingParams
from bifolio.spec import PageSpec
from bifolio.spec.page import HEADER_FILL, HEADER_SEAL

MODELS = {"smollm2-135m": (30, 3, 64), "qwen2.5-0.5b": (24, 2, 64), "llama-3-8b": (32, 8, 128)}
PAIRS = (("bf16", "bf16"), ("bf16", "fp8"), ("bf16", "fp8:token"), ("fp8", "fp8"))
TRANSPORTS = ("loopback", "shared memory", "tcp")
WRITER, SLOTS, ROUNDS = 7, 256, 5


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


class HandoffBench:
    """Two pools of one shape; the pages of the prompt stand in the first."""

    def __init__(self, ops: NativeOps, specs: tuple[PageSpec, PageSpec], tokens: int) -> None:
        self.source, self.target = specs
        self.ops, self.tokens = ops, tokens
        self.pages = KVPool(self.source, self.source.pages_for(tokens))
        self.cache = CacheManager(PagePool(self.pages.pages), self.source.page_size, WRITER, WRITER)
        self.table = self.cache.open(array("I", range(tokens)), tokens, "", 0)
        self.cache.reserve(self.table, tokens)
        self.pages.tensor.random_(0x30, 0x40)
        self.pages.stamp(self.cache.pool.take_stamps())
        numbers = self.table.page_ids
        self.pages.headers[numbers, HEADER_FILL] = self.source.page_size
        self.pages.headers[numbers, HEADER_SEAL] = ops.seals(self.pages.tensor, numbers, 64)
        self.arrived: list[PageTable] = []

    def hello(self, role: Role, spec: PageSpec) -> WorkerHello:
        return WorkerHello(
            version=PROTOCOL_VERSION,
            role=role,
            nonce=b"",
            boot_epoch=1,
            region="here",
            model=ModelFingerprint("c", "t", "w"),
            page=page_shape(spec),
            writer=WRITER if role is Role.PREFILL else 0,
            slots=SLOTS if role is Role.DECODE else 0,
            max_tokens=2 * self.tokens,
        )

    def run(self, name: str, ends: tuple[Transport, Transport]) -> HandoffResult:
        """Hand the prompt over several times; nothing stays cached on the decode side."""
        pool = KVPool(self.target, self.target.pages_for(self.tokens))
        writer = handed_writer(WRITER, self.source, self.target, b"", b"")
        cache = CacheManager(
            PagePool(pool.pages), self.target.page_size, writer, WRITER, prefix_cache=False
        )
        sink = PoolSink(
            cache,
            pool,
            self.ops,
            bind=lambda _writer: None,
            check=lambda _request: None,
            room=lambda _request, _pages: True,
            admit=lambda _request, table, _result: self.arrived.append(table),
            withdraw=lambda _request_id: None,
        )
        record = self.target.page_bytes
        prefill = HandoffSender(
            Link(ends[0], self.hello(Role.PREFILL, self.source), record),
            PoolSource(self.pages, self.ops),
        )
        decode = HandoffReceiver[PoolReservation](
            Link(ends[1], self.hello(Role.DECODE, self.target), record), sink
        )
        while not (prefill.ready and decode.ready):
            prefill.poll()
            decode.poll()
        rounds = [self._once(prefill, decode, cache, str(i)) for i in range(ROUNDS)]
        prefill.link.close("done")
        codec = f"{self.source.cache} > {self.target.cache}"
        sent = record * self.target.pages_for(self.tokens)
        read = self.source.page_bytes * self.source.pages_for(self.tokens)
        near, far = (min(times) for times in zip(*rounds, strict=True))
        return HandoffResult(name, codec, sent / self.tokens, near, far, (read + sent) / near / 1e6)

    def _once(
        self,
        prefill: HandoffSender,
        decode: HandoffReceiver[PoolReservation],
        cache: CacheManager,
        name: str,
    ) -> tuple[float, float]:
        """Milliseconds of either side."""
        clock = time.thread_time if self.ops.threads == 1 else time.perf_counter
        sampling = SamplingParams(max_tokens=8)
        request = Request(id=name, prompt_ids=list(range(self.tokens)), sampling=sampling)
        prefill.offer(request, self.table)
        prefill.finish(name, PrefillResult(token=1))
        spent = [0.0, 0.0]
        delivered = False
        while not delivered:
            before = clock()
            events = prefill.poll()
            between = clock()
            decode.poll()
            spent[0] += between - before
            spent[1] += clock() - between
            delivered = any(isinstance(event, Delivered) for event in events)
        cache.release(self.arrived.pop())
        return spent[0] * 1e3, spent[1] * 1e3


@contextmanager
def connected(name: str) -> Iterator[tuple[Transport, Transport]]:
    """Prefill end and decode end of a new connection."""
    if name == "loopback":
        yield loopback()
    elif name == "shared memory":
        one, other = socket.socketpair()
        yield SharedMemory(one), SharedMemory(other)
    else:
        server, client = Network(b"bench"), Network(b"bench")
        near = client.connect("127.0.0.1", server.listen("127.0.0.1", 0))
        while (far := server.accept()) is None:
            time.sleep(0.001)
        yield near, far
        client.close()
        server.close()


def measure(
    ops: NativeOps, model: str, tokens: int, page: int, transports: Sequence[str] = TRANSPORTS
) -> list[HandoffResult]:
    """Every pair of formats over every transport; lines for people on the way."""
    results = []
    for pair in PAIRS:
        one, other = (PageSpec(*MODELS[model], CacheFormat.parse(f), page) for f in pair)
        bench = HandoffBench(ops, (one, other), tokens)
        for name in transports:
            with connected(name) as ends:
                results.append(bench.run(name, ends))
            print(results[-1], flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", choices=list(MODELS))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(NativeOps(args.threads), args.model, args.tokens, args.page)
    results = [asdict(result) for result in found]
    print(json.dumps({"model": args.model, "tokens": args.tokens, "results": results}))


if __name__ == "__main__":
    sys.exit(main())
