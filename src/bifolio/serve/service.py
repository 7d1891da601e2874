"""What every route needs: the engine, the text side, the limits, and the way from text to ids."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from bifolio import __version__
from bifolio.config import ServerConfig
from bifolio.engine.chat_template import ChatTemplate
from bifolio.engine.client import EngineClient
from bifolio.engine.tokenizer import Tokenizer
from bifolio.errors import EngineDeadError, RequestError
from bifolio.request import SamplingParams, context_exceeded
from bifolio.serve.conversation import read_messages
from bifolio.serve.failures import MODEL_NOT_FOUND
from bifolio.serve.metrics import Metrics
from bifolio.serve.protocol import ChatBody, TokenizeBody
from bifolio.words import counted, shown

logger = logging.getLogger(__name__)

_LONG_TEXT = 50_000
"""Characters from which on text is encoded beside the event loop (about 50 ms of work)."""

_MESSAGE_TEXT = 100
"""Characters that take as long as a message without any."""

Result = TypeVar("Result")

SESSION_HEADER = "X-Session-ID"
MAX_SESSION_CHARS = 128


def session_of(headers: Mapping[str, str]) -> str:
    """The session that a request says it belongs to: its turns go to the same prefill worker.

    It changes where a request is computed, never what comes out.
    """
    return headers.get(SESSION_HEADER, "")[:MAX_SESSION_CHARS]


class Service:
    """State of one server. `draining` refuses new requests."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        config: ServerConfig,
        default_sampling: SamplingParams,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.template = template
        self.config = config
        self.default_sampling = default_sampling
        """What a request is sampled by that does not say otherwise."""
        self.metrics = Metrics(engine)
        self.model = config.served_name or engine.hello.model
        self.fingerprint = f"bifolio-{__version__} {engine.hello.plan}"
        self.stop_ids = sorted({*engine.hello.stop_ids, *tokenizer.stop_ids})
        """End tokens of every answer: those of the checkpoint and those of the tokenizer."""
        self.draining = False
        self._encoder = ThreadPoolExecutor(1, "encode")

    def check_open(self, model: str | None) -> None:
        """Refuse when the server is shutting down, or a model is named that it does not have."""
        if self.draining:
            raise EngineDeadError("the server is shutting down")
        if model is not None and model != self.model:
            raise RequestError(
                f"the model {shown(model)} does not exist here; this server has {self.model!r}",
                "model",
                MODEL_NOT_FOUND,
            )

    def check_chars(self, text: str, param: str) -> None:
        """Refuse a text that cannot fit before any time is spent on cutting it into tokens."""
        limit = self.engine.hello.max_model_len
        if len(text) > self.tokenizer.most_chars(limit):
            raise context_exceeded(limit, f": it has {len(text)} characters", param)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a plain prompt."""
        ids = await self._work(
            len(text), lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )
        if self.tokenizer.starts_with_two_bos(ids):
            logger.warning("a prompt starts with two BOS: its text has one, the tokenizer adds one")
        return ids

    async def encode_chat(self, body: ChatBody | TokenizeBody) -> list[int]:
        """Ids of a conversation, rendered by the template."""
        template = self.template
        if template is None:
            raise RequestError("this model has no chat template; use /v1/completions", "messages")
        messages = read_messages(body.messages or [])
        size = sum(_MESSAGE_TEXT + len(message["content"]) for message in messages)

        def work() -> list[int]:
            prompt = template.render(
                messages,
                tools=body.tools or None,
                add_generation_prompt=body.add_generation_prompt is not False,
                continue_final_message=bool(body.continue_final_message),
                variables=body.template_variables,
            )
            self.check_chars(prompt.text, "messages")
            return self.tokenizer.encode(prompt.text, guard=prompt.guard)

        ids = await self._work(size, work)
        if self.tokenizer.starts_with_two_bos(ids):
            logger.warning("the chat template writes BOS twice")
        return ids

    def check_ids(self, ids: Sequence[Any], param: str) -> list[int]:
        """Token ids from a request: integers below the size of the model's vocabulary."""
        vocab = self.engine.hello.vocab
        for token in ids:
            if type(token) is not int or not 0 <= token < vocab:
                raise RequestError(
                    f"{param}: {shown(token)} is no token id (0 to {vocab - 1})", param
                )
        return list(ids)

    def answer_length(
        self, prompt: Sequence[int], wanted: int | None, prompt_param: str, param: str
    ) -> int:
        """Most tokens of an answer: `wanted`, but no more than the context has left.

        RequestError when the prompt leaves no room, naming the limit.
        """
        limit = self.engine.hello.max_model_len
        if not prompt:
            raise RequestError(f"{prompt_param}: the prompt has no tokens", prompt_param)
        if len(prompt) >= limit:
            has = f"it has {counted(len(prompt), 'token')}"
            details = f": {has}, and at least one more is for the answer"
            raise context_exceeded(limit, details, prompt_param)
        left = limit - len(prompt)
        if wanted is None:
            return left
        if wanted < 1:
            raise RequestError(f"{param}: must be at least 1", param)
        return min(wanted, left)

    async def _work(self, size: int, work: Callable[[], Result]) -> Result:
        """Do it here, or in a thread when it would hold up every other stream."""
        if size < _LONG_TEXT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._encoder, work)
