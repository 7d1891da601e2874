"""What every route needs: the engine, the text side, the limits, and the way from text to ids."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request

from bifolio import __version__
from bifolio.config import ServerConfig
from bifolio.errors import EngineDeadError, RequestError
from bifolio.process.client import EngineClient
from bifolio.request import SamplingParams
from bifolio.server.error_responses import MODEL_NOT_FOUND
from bifolio.server.prepare import BodyRoute, Prepared
from bifolio.server.server_metrics import ServerMetrics
from bifolio.server.streams import while_connected
from bifolio.server.text_pool import TextService
from bifolio.text.prompt_ids import TextLimits
from bifolio.text.tokenizer import Tokenizer
from bifolio.wording import shown


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
        client = tenant_of(request) or ("" if request.client is None else request.client.host)
        return await while_connected(
            request.receive, self.text.prepare(route, data, self.limits, client)
        )

    @property
    def limits(self) -> TextLimits:
        """What the engine can take."""
        return TextLimits(self.engine.hello.max_model_len, self.engine.hello.vocab)
