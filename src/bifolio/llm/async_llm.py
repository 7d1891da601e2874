"""AsyncLLM: the same for asyncio, over an engine in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from bifolio.errors import BifolioError, EngineDeadError, OverloadedError, RequestError
from bifolio.formats import PrecisionPlan
from bifolio.llm.pending import Conversation, LoadedText, Params, PendingRequest, Prompt
from bifolio.llm.results import RequestOutput
from bifolio.llm.waiting import BatchProgress, bars
from bifolio.process.client import AsyncEngine
from bifolio.process.logs import configure_library
from bifolio.request import SamplingParams
from bifolio.text.answer_text import AnswerPiece

if TYPE_CHECKING:
    from bifolio.stats import EngineStats
    from bifolio.text.tokenizer import Tokenizer


class AsyncLLM:
    """A model for asyncio programs; arguments, errors and results are those of `LLM`.

    The engine runs in a process of its own, so the event loop stays free. Use as
    `async with AsyncLLM(…) as llm`, or await `start` and `close`. Any number of tasks may use it at
    a time; cancelling one ends its requests.

    Example:
        >>> async with AsyncLLM("smollm2-135m") as llm:
        ...     (output,) = await llm.generate("The capital of France is", max_tokens=4)
        >>> len(output.outputs[0].token_ids)
        4
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
        self._options = options | {"model": model, "plan": plan}
        self._chat_template = chat_template
        self._generation_config = generation_config
        self._progress = progress
        self._engine: AsyncEngine | None = None

    async def start(self) -> None:
        """Load the model; errors as of `LLM`. EngineDeadError: the process ended while loading."""
        with bars(self._progress) as report:
            loaded = await asyncio.to_thread(
                LoadedText.of, self._options, self._chat_template, self._generation_config, report
            )
            configure_library(loaded.config.log_level)
            report("starting the engine", 0, 0)
            engine = AsyncEngine(
                loaded.config,
                on_loading=lambda news: report(news.stage, news.done, news.total),
            )
            info = await engine.start()
        self._reader = loaded.reader(info)
        self._most_answers = loaded.config.max_waiting
        self._seats = asyncio.Semaphore(max(1, self._most_answers // 2))
        """Requests of batches that the engine has; the rest of its line is for streams."""
        self._engine = engine

    async def close(self) -> None:
        """End the engine process. Streams that are open raise EngineDeadError."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def plan(self) -> str:
        """See `LLM.plan`."""
        return self._live_engine().hello.plan

    @property
    def max_model_len(self) -> int:
        """See `LLM.max_model_len`."""
        return self._live_engine().hello.max_model_len

    @property
    def default_sampling(self) -> SamplingParams:
        """See `LLM.default_sampling`."""
        self._live_engine()
        return self._reader.default_sampling

    @property
    def tokenizer(self) -> Tokenizer:
        """See `LLM.tokenizer`."""
        self._live_engine()
        return self._reader.text.tokenizer

    @property
    def stats(self) -> EngineStats:
        """Counters and gauges of the engine's latest heartbeat, a quarter of a second old."""
        return self._live_engine().stats

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        progress: bool = True,
        **changes: Any,
    ) -> list[RequestOutput]:
        """See `LLM.generate`. If the process ends, what is not finished ends with an error, too.

        Example:
            >>> outputs = await llm.generate(["the river", "the sea"], max_tokens=4)
            >>> [output.prompt for output in outputs]
            ['the river', 'the sea']
        """
        self._live_engine()
        return await self._complete(self._reader.read(prompts, params, changes), progress)

    async def chat(
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
        """See `LLM.chat`.

        Example:
            >>> messages = [{"role": "user", "content": "the sea"}]
            >>> (output,) = await llm.chat(messages, max_tokens=4)
            >>> output.outputs[0].index
            0
        """
        self._live_engine()
        template_options = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "variables": chat_template_kwargs,
        }
        requests = self._reader.read_chat(messages, params, changes, template_options)
        return await self._complete(requests, progress)

    async def stream(
        self, prompt: Prompt | Conversation, params: SamplingParams | None = None, **changes: Any
    ) -> AsyncGenerator[AnswerPiece, None]:
        """See `LLM.stream`. A loop that is left early ends the request once it is collected;
        wrap the iterator in `contextlib.aclosing` to end it at once.

        Example:
            >>> async for piece in llm.stream("the river", max_tokens=4):
            ...     last = piece
            >>> last.finish_reason
            'length'
        """
        self._live_engine()
        request = self._reader.read_one(prompt, params, changes)
        self._check_answers([request])
        async with aclosing(self._news(request)) as news:
            async for _ in news:
                while request.pieces:
                    yield request.pieces.popleft()
                if request.error is not None:
                    raise request.error

    async def _complete(
        self, requests: list[PendingRequest], progress: bool
    ) -> list[RequestOutput]:
        self._check_answers(requests)
        results: dict[str, RequestOutput] = {}
        with bars(progress) as report:
            done = BatchProgress(report, len(requests))

            async def complete(request: PendingRequest) -> None:
                async with self._seats:
                    try:
                        async with aclosing(self._news(request)) as news:
                            async for _ in news:
                                pass
                    except BifolioError as error:
                        for name in list(request.open):
                            request.fail(name, error)
                results[request.id] = request.result()
                done.ended(request)

            async with asyncio.TaskGroup() as group:
                for request in requests:
                    group.create_task(complete(request))
        return [results[request.id] for request in requests]

    def _check_answers(self, requests: list[PendingRequest]) -> None:
        """All answers to a prompt wait in the engine's line at a time."""
        n = max((len(request.sequences) for request in requests), default=0)
        if n > self._most_answers:
            raise RequestError(
                f"n: {n} answers are more than max_waiting={self._most_answers}; "
                f"hint: AsyncLLM(…, max_waiting={n})",
                "n",
            )

    async def _news(self, request: PendingRequest) -> AsyncGenerator[None, None]:
        """Have a request computed; yields whenever there is news of it."""
        engine = self._live_engine()
        while True:
            try:
                async with aclosing(engine.generate(*request.sequences)) as outputs:
                    async for output in outputs:
                        if request.take(output) and output.finish is None:
                            engine.abort(output.id)
                        yield
                return
            except OverloadedError as error:  # all refused, none has begun
                await asyncio.sleep(error.retry_after)

    def _live_engine(self) -> AsyncEngine:
        if self._engine is None:
            raise EngineDeadError(
                "this AsyncLLM is not running; hint: use it within `async with`, or await start()"
            )
        if self._engine.is_dead:
            raise EngineDeadError("the engine process has ended; hint: create another AsyncLLM")
        return self._engine
