"""A server on a real socket that streams answers as badly as it is told to."""

import asyncio
import contextlib
import itertools
import json
import threading
from dataclasses import dataclass, field
from unittest.mock import patch

from bifolio.lab.bench.stream import Stream


@dataclass
class Mock:
    """How it behaves, and what it has seen. Tokens of chunks follow `chunks` in turn."""

    chunks: tuple[int, ...] = (1,)
    usage: str | None = "continuous"
    """`continuous`, `final`, or None; a dialect that it does not know is answered with 400."""
    strict: bool = False
    """Refuse `continuous_usage_stats` and `ignore_eos`, as the OpenAI API itself does."""
    more: tuple[int, ...] = (0,)
    """Tokens beyond those asked for, of one answer after the other in turn."""
    finish: str = "length"
    cut: int = 0
    """Tokens of each prompt that it drops in silence."""
    fail_every: int = 0
    hang_up_every: int = 0
    politely: bool = False
    """End the body as HTTP wants it, though the answer is not at its end."""
    first_delay: float = 0.0
    chunk_delay: float = 0.0
    together: int = 0
    """Answer nobody before so many have asked."""
    stepwise: bool = False
    """Send no chunk before the one before has been read, so that each arrives by itself."""
    hit_share: float | None = None
    """Share of the prompts that is said to come from the cache, in usage and metrics."""
    usage_hits: bool = False
    lie: int = 0
    """Added to the final usage."""
    metrics: bool = True
    silent: bool = False
    """Chunks have no text at all."""
    template: int = 7
    """Tokens around the words of a message; the first of them come from the cache."""
    loading: bool = False
    new_names: bool = False
    """Know `max_completion_tokens` alone."""
    keep_alive: bool = True
    bodies: list[dict] = field(default_factory=list)
    connections: int = 0
    most_open: int = 0
    events_read: int = 0
    _events_sent: int = 0
    _open: int = 0
    _prompts: float = 0
    _hits: float = 0
    _numbers: itertools.count = field(default_factory=itertools.count)

    def __post_init__(self):
        self._more = itertools.cycle(self.more)

    async def handle(self, reader, writer):
        self.connections += 1
        try:
            while await self._request(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _request(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        lengths = [
            line for line in head.split("\r\n") if line.lower().startswith("content-length:")
        ]
        length = int(lengths[0].split(":")[1]) if lengths else 0
        body = await reader.readexactly(length)
        if method == "GET":
            self._get(writer, path)
            return self.keep_alive
        return await self._complete(writer, json.loads(body), chat="/chat/" in path)

    def _get(self, writer, path):
        if self.loading:
            self._plain(writer, 503, {"error": {"message": "Loading model"}})
        elif path == "/v1/models":
            self._plain(writer, 200, {"data": [{"id": "mock", "max_model_len": 4096}]})
        elif path == "/metrics" and self.metrics:
            text = (
                f"vllm:prefix_cache_queries_total {self._prompts}\n"
                f"vllm:prefix_cache_hits_total {self._hits}\n"
                'vllm:num_requests_running{engine="0"} 3\n'
                'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n'
            )
            self._plain(writer, 200, text)
        else:
            self._plain(writer, 404, {"error": {"message": "no such path"}})

    def _plain(self, writer, status, body):
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        keep = "keep-alive" if self.keep_alive else "close"
        head = f"HTTP/1.1 {status} X\r\nConnection: {keep}\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)

    async def _complete(self, writer, body, chat):
        options = body.get("stream_options", {})
        if self.strict and ("ignore_eos" in body or "continuous_usage_stats" in options):
            self._plain(writer, 400, {"error": {"message": "unknown parameter"}})
            return True
        if self.new_names and "max_tokens" in body:
            self._plain(writer, 400, {"error": {"message": "use max_completion_tokens"}})
            return True
        probe = not self.bodies
        self.bodies.append(body)
        number = next(self._numbers)
        if self.fail_every and not probe and number % self.fail_every == 0:
            self._plain(writer, 400, {"error": {"message": "I do not like this one"}})
            return True
        if chat:
            said = [message["content"].split() for message in body["messages"]]
            prompt = sum(map(len, said)) + self.template * len(said)
        else:
            prompt = len(body["prompt"])
        prompt -= self.cut
        self._prompts += prompt
        self._hits += prompt * (self.hit_share or 0)
        self._open += 1
        self.most_open = max(self.most_open, self._open)
        try:
            while self.most_open < self.together and not probe:
                await asyncio.sleep(0.001)
            return await self._answer(writer, body, prompt, chat, probe, number)
        finally:
            self._open -= 1

    async def _answer(self, writer, body, prompt, chat, probe, number):
        await asyncio.sleep(self.first_delay)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        hang_up = self.hang_up_every and not probe and number % self.hang_up_every == 0
        tokens = body.get("max_tokens") or body["max_completion_tokens"]
        if chat:
            role = {"index": 0, "delta": {"role": "assistant", "content": None}}
            self._event(writer, json.dumps({"choices": [role | {"finish_reason": None}]}))
        return await self._stream(
            writer, prompt, tokens + self._next_more(probe), bool(hang_up), chat
        )

    def _next_more(self, probe):
        return 0 if probe else next(self._more)

    async def _stream(self, writer, prompt, tokens, hang_up, chat):
        sent, sizes = 0, itertools.cycle(self.chunks)
        while sent < tokens:
            size = min(next(sizes), tokens - sent)
            sent += size
            text = "" if self.silent or not size else "wor" * size
            end = self.finish if sent == tokens else None
            words = {"delta": {"content": text}} if chat else {"text": text}
            event = {"choices": [{"index": 0, "finish_reason": end} | words]}
            if self.usage == "continuous":
                event["usage"] = self._usage(prompt, sent)
            self._event(writer, json.dumps(event))
            await writer.drain()
            if hang_up:
                writer.write(b"0\r\n\r\n" if self.politely else b"")
                return self.politely
            while self.stepwise and self.events_read < self._events_sent:
                await asyncio.sleep(0.001)
            await asyncio.sleep(self.chunk_delay)
        if self.usage:
            usage = self._usage(prompt, sent + self.lie)
            self._event(writer, json.dumps({"choices": [], "usage": usage}))
        self._event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        return True

    def _usage(self, prompt, completion):
        usage = {"prompt_tokens": prompt, "completion_tokens": completion}
        if self.usage_hits:
            cached = int(prompt * (self.hit_share or 0))
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage

    def _event(self, writer, data):
        self._events_sent += 1
        payload = f"data: {data}\n\n".encode()
        # Split inside the event, so that no reader can take a piece of the body for an event.
        for part in (payload[:9], payload[9:]):
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")


@contextlib.contextmanager
def serving(mock):
    """Run it in a thread; yields its address."""
    ready, told = threading.Event(), []
    take = Stream._event

    def counted(stream, data, now):
        take(stream, data, now)
        mock.events_read += 1

    async def main():
        stop = asyncio.Event()
        server = await asyncio.start_server(mock.handle, "127.0.0.1", 0)
        told.extend((server.sockets[0].getsockname()[1], asyncio.get_running_loop(), stop))
        ready.set()
        await stop.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    ready.wait()
    port, loop, stop = told
    try:
        with patch.object(Stream, "_event", counted) if mock.stepwise else contextlib.nullcontext():
            yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
