"""What every route needs: the engine, the text side, the limits, and the way from text to ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.requests import Request

from bifolio import __version__
from bifolio.config import ServerConfig
from bifolio.errors import EngineDeadError, RequestError
from bifolio.process.client import EngineClient
from bifolio.request import SamplingParams, context_exceeded
from bifolio.server.error_responses import MODEL_NOT_FOUND
from bifolio.server.prepare import BodyRoute, Prepared, TextLimits
from bifolio.server.server_metrics import ServerMetrics
from bifolio.server.streams import while_connected
from bifolio.server.text_pool import TextService
from bifolio.text.tokenizer import Tokenizer
from bifolio.wording import plural, shown


def tenant_of(request: Request) -> str:
    """Who sent a request, by a digest of its key; empty on a server without keys."""
    tenant: str = request.scope.get("state", {}).get("tenant", "")
    return tenant


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
        text: TextService,
        config: ServerConfig,
        default_sampling: SamplingParams,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.text = text
        self.config = config
        self.default_sampling = default_sampling
        """What a request is sampled by that does not say otherwise."""
        self.metrics = ServerMetrics(engine)
        self.model = config.served_name or engine.hello.model
        self.fingerprint = f"bifolio-{__version__} {engine.hello.plan}"
        self.end_ids = frozenset(i for i in tokenizer.stop_ids if i < engine.hello.vocab)
        """End tokens of the tokenizer that the model has."""
        self.stop_ids = sorted({*engine.hello.stop_ids, *self.end_ids})
        """End tokens of every answer: those of the checkpoint and those of the tokenizer."""
        self.draining = False

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

    async def prepare(self, route: BodyRoute, data: bytes, request: Request) -> Prepared:
        """Read a body and turn its text into ids, in a text process, while the client waits."""
        hello = self.engine.hello
        client = tenant_of(request) or ("" if request.client is None else request.client.host)
        limits = TextLimits(hello.max_model_len, hello.vocab)
        return await while_connected(
            request.receive, self.text.prepare(route, data, limits, client)
        )

    def answer_length(
        self, prompt: Sequence[int], wanted: int | None, prompt_param: str, param: str
    ) -> int:
        """Most tokens of an answer: `wanted`, but no more than the context has left.

        RequestError when the prompt leaves no room, naming the limit, or has a token that the
        tokenizer knows and the model does not.
        """
        limit, vocab = self.engine.hello.max_model_len, self.engine.hello.vocab
        if (most := max(prompt, default=0)) >= vocab:
            raise RequestError(
                f"{prompt_param}: {shown(self.tokenizer.token_text(most))} is token {most} of the "
                f"tokenizer, but this model has {vocab} tokens; leave it out",
                prompt_param,
            )
        if not prompt:
            raise RequestError(f"{prompt_param}: the prompt has no tokens", prompt_param)
        if len(prompt) >= limit:
            has = f"it has {plural(len(prompt), 'token')}"
            details = f": {has}, and at least one more is for the answer"
            raise context_exceeded(limit, details, prompt_param)
        left = limit - len(prompt)
        if wanted is None:
            return left
        if wanted < 1:
            raise RequestError(f"{param}: must be at least 1", param)
        return min(wanted, left)
