"""An engine without a model: it repeats the prompt, then stops. Everything about it is exact.

The reply to a prompt is the prompt's own ids in order, then `stop_id`; with a temperature above
zero the reply starts `seed % len(prompt)` ids later, so that a test sees which seed arrived. With
`ignore_eos` the reply goes round. Some ids, when it is their turn to be emitted, are accidents:
the process dies, the step raises, hangs, finds a wrong page, or takes long and lets it be known.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import msgspec

from bifolio.config import EngineConfig
from bifolio.engine.messages import EngineInfo
from bifolio.errors import CheckpointError, OverloadedError, RequestError
from bifolio.process.worker import Progress
from bifolio.request import ErrorCode, FinishReason, Output, Request, TokenLogprobs
from bifolio.stats import EngineStats

FACTORY = "support.scripted_engine:create"
"""For AsyncEngine's `factory`."""


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine does. `step_seconds` is slept in each step; ids of -1 are off."""

    vocab: int = 512
    stop_id: int = 2
    max_model_len: int = 4096
    page_size: int = 16
    pages: int = 4096
    step_seconds: float = 0.0
    kill_id: int = -1
    raise_id: int = -1
    hang_id: int = -1
    hang_seconds: float = 3600.0
    long_id: int = -1
    long_seconds: float = 0.0
    fault_id: int = -1
    load_error: str = ""
    load_killed: bool = False


def scripted_config(script: Script, **options: int) -> EngineConfig:
    """The EngineConfig from which `create` reads the script back (it stands in `model`)."""
    return EngineConfig(model=msgspec.json.encode(script).decode(), **options)  # type: ignore[arg-type]


def create(config: EngineConfig, progress: Progress) -> ScriptedEngine:
    """Factory for the engine process."""
    script = msgspec.json.decode(config.model, type=Script)
    progress("script", 1, 1)
    if script.load_killed:
        os.kill(os.getpid(), signal.SIGKILL)
    if script.load_error:
        raise CheckpointError(script.load_error)
    return ScriptedEngine(script, config.max_num_seqs, config.max_waiting)


class _Running:
    def __init__(self, request: Request, cached: int) -> None:
        self.request = request
        self.emitted = 0
        self.cached = cached
        prompt, sampling = request.prompt_ids, request.sampling
        shift = (sampling.seed or 0) % len(prompt) if sampling.temperature > 0 else 0
        self.reply = prompt[shift:] + prompt[:shift]


class ScriptedEngine:
    """The worker's Engine protocol over a queue, a batch, and pages that are only counted."""

    def __init__(self, script: Script, max_num_seqs: int, max_waiting: int) -> None:
        self._script = script
        self._max_num_seqs = max_num_seqs
        self._max_waiting = max_waiting
        self._waiting: dict[str, Request] = {}
        self._running: dict[str, _Running] = {}
        self._seen: set[tuple[str, tuple[int, ...]]] = set()
        self._steps = self._prompt_tokens = self._generation_tokens = 0
        self._queries = self._hits = self._checked = self._failures = 0
        self._heartbeat: Callable[[], None] = lambda: None

    def hello(self) -> EngineInfo:
        script = self._script
        return EngineInfo(
            model="scripted",
            vocab=script.vocab,
            max_model_len=script.max_model_len,
            stop_ids=(script.stop_id,),
            page_size=script.page_size,
            pages=script.pages,
            page_bytes=1024,
            plan="scripted",
            kernels="none",
            boot_epoch=1,
        )

    def add(self, request: Request) -> None:
        if len(self._waiting) >= self._max_waiting:
            raise OverloadedError(f"{len(self._waiting)} requests are waiting", retry_after=1.0)
        if len(request.prompt_ids) >= self._script.max_model_len:
            raise RequestError("the prompt fills the context", param="prompt")
        assert request.prompt_ids, "the front end lets no empty prompt pass"
        request.sampling.check(self._script.vocab)
        self._waiting[request.id] = request

    def abort(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        self._running.pop(request_id, None)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def step(self) -> list[Output]:
        self._steps += 1
        time.sleep(self._script.step_seconds)
        while self._waiting and len(self._running) < self._max_num_seqs:
            self._start(self._waiting.pop(next(iter(self._waiting))))
        outputs = [self._advance(sequence) for sequence in self._running.values()]
        for output in outputs:
            if output.finish is not None:
                del self._running[output.id]
        return outputs

    def stats(self) -> EngineStats:
        live = sum(self._pages(sequence) for sequence in self._running.values())
        return EngineStats(
            steps=self._steps,
            computed_tokens=self._prompt_tokens + self._generation_tokens,
            running=len(self._running),
            waiting=len(self._waiting),
            free_pages=self._script.pages - live,
            live_pages=live,
            query_tokens=self._prompt_tokens,
            generated_tokens=self._generation_tokens,
            hit_tokens=self._hits,
            pages_checked=self._checked,
            integrity_faults=self._failures,
        )

    def on_heartbeat(self, heartbeat: Callable[[], None]) -> None:
        self._heartbeat = heartbeat

    def scrub(self) -> None:
        """Nothing is kept."""

    @property
    def peers(self) -> None:
        return None

    def close(self) -> None:
        self._running.clear()

    def _start(self, request: Request) -> None:
        key = (request.cache_salt, tuple(request.prompt_ids))
        length, page = len(request.prompt_ids), self._script.page_size
        cached = (length - 1) // page * page if key in self._seen else 0
        self._seen.add(key)
        self._queries += length
        self._hits += cached
        self._prompt_tokens += length
        self._running[request.id] = _Running(request, cached)

    def _pages(self, sequence: _Running) -> int:
        tokens = len(sequence.request.prompt_ids) + sequence.emitted
        return -(-tokens // self._script.page_size)

    def _advance(self, sequence: _Running) -> Output:
        request, sampling = sequence.request, sequence.request.sampling
        keep_going = sampling.ignore_eos or sequence.emitted < sampling.min_tokens
        over = sequence.emitted >= len(sequence.reply) and not keep_going
        token = (
            self._script.stop_id if over else sequence.reply[sequence.emitted % len(sequence.reply)]
        )
        self._checked += self._pages(sequence)
        output = Output(
            id=request.id, cached_tokens=sequence.cached, pages_checked=self._pages(sequence)
        )
        if self._accident(token, output):
            return output
        if sequence.emitted == 0 and sampling.prompt_logprobs is not None:
            output.prompt_logprobs = [
                None,
                *(self._logprobs(t, sampling.prompt_logprobs) for t in request.prompt_ids[1:]),
            ]
        sequence.emitted += 1
        self._generation_tokens += 1
        output.tokens = [token]
        if sampling.logprobs is not None:
            output.logprobs = [self._logprobs(token, sampling.logprobs)]
        if over or (token in sampling.stop_token_ids and sequence.emitted > sampling.min_tokens):
            output.finish, output.stop_id = FinishReason.STOP, token
        elif sequence.emitted >= sampling.max_tokens or (
            len(request.prompt_ids) + sequence.emitted >= self._script.max_model_len
        ):
            output.finish = FinishReason.LENGTH
        return output

    def _accident(self, token: int, output: Output) -> bool:
        script = self._script
        if token == script.kill_id:
            os.kill(os.getpid(), signal.SIGKILL)
        if token == script.raise_id:
            raise RuntimeError("the script says raise")
        if token == script.hang_id:
            time.sleep(script.hang_seconds)
        if token == script.long_id:
            for _ in range(20):
                time.sleep(script.long_seconds / 20)
                self._heartbeat()
        if token == script.fault_id:
            self._failures += 1
            output.finish, output.error_code = FinishReason.ERROR, ErrorCode.CACHE_INTEGRITY
            output.error = "page 7 carries tag 1, expected 2"
            return True
        return False

    def _logprobs(self, token: int, count: int) -> TokenLogprobs:
        """The token is the best one; alternatives are the ids after it, each half a nat worse."""
        top = [((token + k) % self._script.vocab, -0.25 - 0.5 * k) for k in range(count)]
        return TokenLogprobs(logprob=-0.25, rank=1, top=top)
