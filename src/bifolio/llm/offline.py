"""LLM: an engine in this process, for scripts and notebooks.

Whoever waits steps the engine: `generate` until its requests have ended, a stream until it has
news. Requests of all callers share the steps, so several streams, or `generate` from several
threads, run as one batch. One thread steps at a time.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from bifolio.errors import EngineDeadError, OverloadedError, RequestError
from bifolio.formats import PrecisionPlan
from bifolio.llm.pending import Conversation, LoadedText, Params, PendingRequest, Prompt
from bifolio.llm.results import RequestOutput
from bifolio.llm.waiting import BatchProgress, bars, deferred_interrupts
from bifolio.process.logs import configure_library
from bifolio.request import Request, SamplingParams
from bifolio.text.answer_text import AnswerPiece

if TYPE_CHECKING:
    from bifolio.engine.engine import Engine
    from bifolio.stats import EngineStats
    from bifolio.text.tokenizer import Tokenizer

_SCRUB_SECONDS = 0.25
"""Time between two looks at cached pages (`Engine.scrub`)."""


class LLM:
    """A model in this process.

    Args:
        model: A folder, a .gguf file, a Hugging Face id, or a built-in name, as for
            `bifolio serve`.
        plan: Formats of weights and cache, such as `"int4:g32:a8/fp8"`, or a PrecisionPlan.
        chat_template: A jinja2 file, or a template's text, to use instead of the model's.
        generation_config: `"none"` ignores the sampling that the model's files recommend.
        progress: Show on a terminal how far loading has come.
        **options: `prefill`, `decode` and the fields of `bifolio.config.EngineConfig`, such as
            `cache_memory="2GiB"`, `max_model_len=4096`, `threads=8`.

    Raises:
        ConfigError: An option is unknown or cannot work, or there is no such model.
        CheckpointError: The model's files are incomplete or damaged.

    Example:
        >>> from bifolio import LLM, SamplingParams
        >>> with LLM("smollm2-135m", plan="int8/bf16") as llm:
        ...     (output,) = llm.generate("The capital of France is", SamplingParams(temperature=0))
        >>> output.outputs[0].finish_reason
        'length'
    """

    def __init__(
        self,
        model: str,
        plan: str | PrecisionPlan | None = None,
        *,
        chat_template: str = "",
        generation_config: Literal["auto", "none"] = "auto",
        progress: bool = True,
        **options: Any,
    ) -> None:
        with bars(progress) as report:
            loaded = LoadedText.of(
                options | {"model": model, "plan": plan}, chat_template, generation_config, report
            )
            configure_library(loaded.config.log_level)
            report("importing torch", 0, 0)
            from bifolio.engine.engine import Engine

            self._engine: Engine | None = Engine(loaded.config, report)
        self._info = self._engine.hello()
        self._reader = loaded.reader(self._info)
        self._running: dict[str, PendingRequest] = {}
        """Requests in the engine, by the names of their sequences."""
        self._aborted: deque[str] = deque()
        """Sequences to forget before the next step."""
        self._lock = threading.Lock()
        """Held by the thread that steps."""
        self._scrub_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the model and its cache. Streams that are open raise EngineDeadError."""
        with self._lock:
            if self._engine is not None:
                self._engine.close()
            self._engine = None
            self._running.clear()
        gc.collect()

    @property
    def plan(self) -> str:
        """The formats in use, with those that `auto` stands for, and the page size."""
        return self._info.plan

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self._info.max_model_len

    @property
    def default_sampling(self) -> SamplingParams:
        """What prompts without parameters are sampled by: what the model's files recommend."""
        return self._reader.default_sampling

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Example:
            >>> llm.tokenizer.decode(llm.tokenizer.encode("the river"))
            'the river'
        """
        return self._reader.text.tokenizer

    @property
    def stats(self) -> EngineStats:
        """Counters and gauges of this moment.

        Example:
            >>> llm.stats.running
            0
        """
        with self._lock, deferred_interrupts():
            engine = self._live_engine()
            self._forget_aborted(engine)
            return engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        progress: bool = True,
        **changes: Any,
    ) -> list[RequestOutput]:
        """Continue prompts, as one batch; the results are in the order of the prompts.

        The whole batch is checked before the first token is computed. A request that fails later
        has `finish_reason="error"` and an `error` in its result, and the others continue. After
        Ctrl-C the requests are forgotten, and the object can be used again.

        Args:
            prompts: A text, a list of token ids, or a list of either.
            params: For all prompts, or a list with one for each. None: `default_sampling`.
            progress: Show a bar, if standard error is a terminal.
            **changes: Sampling parameters by name that win over `params`.

        Raises:
            RequestError: A prompt or a parameter is invalid; nothing has been computed.

        Example:
            >>> outputs = llm.generate(["the river", "the sea"], max_tokens=4, temperature=0)
            >>> [len(output.outputs[0].token_ids) for output in outputs]
            [4, 4]
        """
        return self._complete(self._reader.read(prompts, params, changes), progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: Params = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool = True,
        **changes: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several as one batch; otherwise like `generate`.

        Unless `params` or `max_tokens` bounds it, an answer may be as long as the context allows.

        Args:
            messages: The messages of a conversation, or a list of conversations.
            params: See `generate`.
            tools: Functions that the template shows to the model, as in the API.
            add_generation_prompt: End the prompt where the assistant begins to speak.
            continue_final_message: End it within the last message, which the model continues.
            chat_template_kwargs: Variables for the template, such as `enable_thinking`.
            progress: See `generate`.
            **changes: See `generate`.

        Raises:
            RequestError: As `generate`; or the model has no template, or it refuses a message.

        Example:
            >>> (output,) = llm.chat([{"role": "user", "content": "the sea"}], max_tokens=4)
            >>> output.prompt
            '<|im_start|>user\\nthe sea<|im_end|>\\n<|im_start|>assistant\\n'
        """
        template_options = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "variables": chat_template_kwargs,
        }
        requests = self._reader.read_chat(messages, params, changes, template_options)
        return self._complete(requests, progress)

    def stream(
        self, prompt: Prompt | Conversation, params: SamplingParams | None = None, **changes: Any
    ) -> Iterator[AnswerPiece]:
        """Continue one prompt or answer one conversation, piece by piece.

        The pieces, joined, are what `generate` or `chat` returns. An iterator that is closed or
        dropped ends its request.

        Args:
            prompt: A text, token ids, or messages.
            params: See `generate`.
            **changes: See `generate`.

        Raises:
            RequestError: As `generate`, at once.
            GenerationError: The engine ended the request; raised by the iterator.

        Example:
            >>> pieces = llm.stream("the river", max_tokens=4, temperature=0)
            >>> "".join(p.text for p in pieces) == llm.generate(
            ...     "the river", max_tokens=4, temperature=0)[0].text
            True
        """
        return self._pieces(self._reader.read_one(prompt, params, changes))

    def _complete(self, requests: list[PendingRequest], progress: bool) -> list[RequestOutput]:
        self._live_engine()
        line = deque((request, one) for request in requests for one in request.sequences)
        results: dict[str, RequestOutput] = {}
        running: list[PendingRequest] = []
        with bars(progress) as report:
            done = BatchProgress(report, len(requests))
            try:
                while line or running:
                    running += self._advance(line)
                    for request in running:
                        if not request.open:
                            results[request.id] = request.result()
                            done.ended(request)
                    running = [request for request in running if request.open]
            finally:
                self._abort(requests)
        return [results[request.id] for request in requests]

    def _pieces(self, request: PendingRequest) -> Iterator[AnswerPiece]:
        line = deque((request, one) for one in request.sequences)
        try:
            while request.open and request.error is None:
                self._advance(line)
                while request.pieces:
                    yield request.pieces.popleft()
        finally:
            self._abort([request])
        if request.error is not None:
            raise request.error

    def _advance(self, line: deque[tuple[PendingRequest, Request]]) -> list[PendingRequest]:
        """Put what is in line into the engine, as much as it takes, and compute one step.

        The requests whose first sequence has left the line.
        """
        admitted = []
        with self._lock, deferred_interrupts():
            engine = self._live_engine()
            self._forget_aborted(engine)
            while line:
                request, sequence = line[0]
                try:
                    engine.add(sequence)
                except OverloadedError:  # there is room once others have ended
                    break
                except RequestError as error:
                    request.fail(sequence.id, error)
                else:
                    self._running[sequence.id] = request
                if sequence is request.sequences[0]:
                    admitted.append(request)
                line.popleft()
            if time.monotonic() >= self._scrub_at:
                self._scrub_at = time.monotonic() + _SCRUB_SECONDS
                engine.scrub()
            for output in engine.step() if engine.has_work else ():
                if output.id in self._running and self._running[output.id].take(output):
                    del self._running[output.id]
                    if output.finish is None:
                        engine.abort(output.id)
        return admitted

    def _abort(self, requests: Sequence[PendingRequest]) -> None:
        """Forget requests: at once, or before the next step if a thread is in the middle of one.

        The garbage collector may call this for a stream that was dropped, even during a step.
        """
        self._aborted.extend(name for request in requests for name in request.open)
        if self._engine is not None and self._lock.acquire(blocking=False):
            try:
                with deferred_interrupts():
                    self._forget_aborted(self._engine)
            finally:
                self._lock.release()

    def _forget_aborted(self, engine: Engine) -> None:
        while self._aborted:
            name = self._aborted.popleft()
            if self._running.pop(name, None) is not None:
                engine.abort(name)

    def _live_engine(self) -> Engine:
        if self._engine is None:
            raise EngineDeadError("this LLM is closed; hint: create another one")
        return self._engine
