"""From prompts to requests for an engine, and from its outputs to results: no engine in here."""

from __future__ import annotations

import difflib
import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import structlog

from bifolio.checkpoint.default_sampling import DefaultSampling
from bifolio.checkpoint.download_progress import Report
from bifolio.checkpoint.source import resolve_source
from bifolio.config import EngineConfig, resolve_engine
from bifolio.engine.messages import EngineInfo
from bifolio.errors import BifolioError, RequestError
from bifolio.llm.results import CompletionOutput, RequestOutput
from bifolio.request import FinishReason, Output, Request, SamplingParams
from bifolio.text.answer_text import (
    AnswerPiece,
    AnswerText,
    generation_error,
    resolve_params,
    sequence_params,
)
from bifolio.text.prompt_ids import TextLimits, answer_length, chat_ids, check_ids, plain_ids
from bifolio.text.tokenizer import Tokenizer
from bifolio.text.tokenizer_files import TextTools, load_text_side
from bifolio.wording import shown

log = structlog.get_logger(__name__)

Prompt = str | Sequence[int]
"""A text, or token ids."""

Conversation = Sequence[Mapping[str, Any]]
"""Messages with `role` and `content`, as in the chat completions API."""

Params = SamplingParams | Sequence[SamplingParams] | None
"""For all prompts, one for each, or the model's default."""

_serials = itertools.count()
"""Numbers in the names of requests: an engine knows each name once."""


class PendingRequest:
    """One prompt on its way: its sequences, what has come of them, and how they ended."""

    def __init__(
        self,
        prompt: str | None,
        ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        end_ids: Iterable[int],
    ) -> None:
        self.id = f"llm-{next(_serials)}"
        self.pieces: deque[AnswerPiece] = deque()
        """News; a stream takes them out as they come."""
        self._prompt = prompt
        self._ids = ids
        self._answers = {
            f"{self.id}-{i}": AnswerText(i, tokenizer, params) for i in range(params.n)
        }
        self.sequences = [
            Request(id=name, prompt_ids=ids, sampling=sequence_params(params, i, end_ids))
            for i, name in enumerate(self._answers)
        ]
        self.open = set(self._answers)
        """Names of sequences that have not ended."""
        self.error: BifolioError | None = None
        """The first error of an answer."""
        self._errors: dict[int, BifolioError] = {}

    @property
    def generated_tokens(self) -> int:
        return sum(answer.completion_tokens for answer in self._answers.values())

    def take(self, output: Output) -> bool:
        """Add the news of a sequence; whether it has ended."""
        piece = self._answers[output.id].take(output)
        if output.finish in (FinishReason.ERROR, FinishReason.ABORT):
            self.fail(output.id, generation_error(output, "allow more time"))
            piece = msgspec.structs.replace(piece, finish_reason=None)
        elif piece.finish_reason is not None:
            self.open.discard(output.id)
        if not piece.is_admission:
            self.pieces.append(piece)
        return output.id not in self.open

    def fail(self, name: str, error: BifolioError) -> None:
        """End a sequence with an error."""
        self.open.discard(name)
        self._errors[self._answers[name].index] = error
        self.error = self.error or error

    def result(self) -> RequestOutput:
        """The answers, once all sequences have ended."""
        assert not self.open, "the request is not at its end"
        pieces: list[list[AnswerPiece]] = [[] for _ in self._answers]
        for piece in self.pieces:
            pieces[piece.index].append(piece)
        prompt_logprobs = [e for piece in pieces[0] for e in piece.prompt_logprobs or ()]
        answers = list(self._answers.values())
        return RequestOutput(
            request_id=self.id,
            prompt=self._prompt,
            prompt_token_ids=tuple(self._ids),
            prompt_logprobs=tuple(prompt_logprobs) or None,
            outputs=tuple(self._completion(i, parts) for i, parts in enumerate(pieces)),
            cached_tokens=answers[0].cached_tokens,
            pages_checked=sum(answer.pages_checked for answer in answers),
        )

    def _completion(self, index: int, pieces: Sequence[AnswerPiece]) -> CompletionOutput:
        error = self._errors.get(index)
        finish, stop_reason = FinishReason.ERROR.value, None
        if error is None:
            finish, stop_reason = pieces[-1].finish_reason or "", pieces[-1].stop_reason
        logprobs = None
        if self.sequences[index].sampling.logprobs is not None:
            logprobs = tuple(entry for piece in pieces for entry in piece.logprobs or ())
        return CompletionOutput(
            index=index,
            text="".join(piece.text for piece in pieces),
            token_ids=tuple(token for piece in pieces for token in piece.token_ids),
            logprobs=logprobs,
            finish_reason=finish,
            stop_reason=stop_reason,
            error=error,
        )


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Turns prompts and parameters into requests; RequestError names what is wrong with them."""

    text: TextTools
    default_sampling: SamplingParams
    limits: TextLimits

    def read(
        self, prompts: Prompt | Sequence[Prompt], params: Params, changes: Mapping[str, Any]
    ) -> list[PendingRequest]:
        """A request for each prompt, in order."""
        given = _prompt_list(prompts)
        sampling = self._sampling(params, changes, len(given))
        requests = []
        for i, (prompt, one) in enumerate(zip(given, sampling, strict=True)):
            with _Numbered("prompts", i, len(given)):
                if isinstance(prompt, str):
                    ids = plain_ids(prompt, self.text, self.limits)
                else:
                    ids = check_ids(prompt, "prompt", self.limits)
                text = prompt if isinstance(prompt, str) else None
                requests.append(self._request(text, ids, one, one.max_tokens))
        return requests

    def read_chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: Params,
        changes: Mapping[str, Any],
        template_options: Mapping[str, Any],
    ) -> list[PendingRequest]:
        """A request for each conversation, in order.

        Without parameters that say so, an answer may be as long as the context allows.
        """
        conversations = _conversations(messages)
        sampling = self._sampling(params, changes, len(conversations))
        free = params is None and "max_tokens" not in changes
        requests = []
        for i, (conversation, one) in enumerate(zip(conversations, sampling, strict=True)):
            with _Numbered("messages", i, len(conversations)):
                ids = chat_ids(conversation, self.text, self.limits, **template_options)
                text = self.text.tokenizer.decode(ids)
                requests.append(self._request(text, ids, one, None if free else one.max_tokens))
        return requests

    def read_one(
        self,
        prompt: Prompt | Conversation,
        params: SamplingParams | None,
        changes: Mapping[str, Any],
    ) -> PendingRequest:
        """The request of one prompt or one conversation."""
        given: Any = prompt
        if isinstance(given, list | tuple) and given and isinstance(given[0], Mapping):
            requests = self.read_chat(given, params, changes, {})
        else:
            requests = self.read(given, params, changes)
        if len(requests) != 1:
            raise RequestError(
                f"{len(requests)} prompts for a stream; hint: open a stream for each", "prompt"
            )
        return requests[0]

    def _request(
        self, prompt: str | None, ids: list[int], params: SamplingParams, length: int | None
    ) -> PendingRequest:
        tokenizer = self.text.tokenizer
        length = answer_length(ids, length, tokenizer, self.limits)
        params = resolve_params(msgspec.structs.replace(params, max_tokens=length))
        params.check(self.limits.vocab)
        end_ids = [token for token in tokenizer.stop_ids if token < self.limits.vocab]
        return PendingRequest(prompt, ids, params, tokenizer, end_ids)

    def _sampling(
        self, params: Params, changes: Mapping[str, Any], count: int
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [_changed(params or self.default_sampling, changes)] * count
        given: list[Any] = list(params) if isinstance(params, list | tuple) else [params]
        for one in given:
            if not isinstance(one, SamplingParams):
                raise RequestError(
                    f"params: {shown(one)} is no SamplingParams; "
                    "hint: from bifolio import SamplingParams",
                    "params",
                )
        if len(given) != count:
            raise RequestError(
                f"{len(given)} sampling parameters for {count} prompts; "
                "hint: give one SamplingParams for all, or one for each",
                "params",
            )
        return [_changed(one, changes) for one in given]


class _Numbered:
    """Says of which prompt an error is, where there are several."""

    def __init__(self, name: str, index: int, count: int) -> None:
        self._place = f"{name}[{index}]: " if count > 1 else ""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._place and isinstance(error, RequestError):
            raise RequestError(f"{self._place}{error}", error.param, error.code) from error


def _prompt_list(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    is_list = isinstance(prompts, list | tuple)
    if is_list and prompts and all(type(item) is int for item in prompts):
        return [prompts]
    for item in prompts if is_list else [prompts]:
        if not isinstance(item, str | list | tuple):
            raise RequestError(
                f"prompt: {shown(item)} is neither a text nor a list of token ids", "prompt"
            )
    return list(prompts)


def _conversations(messages: Any) -> list[Conversation]:
    given = messages if isinstance(messages, list | tuple) else [messages]
    conversations = [given] if not given or isinstance(given[0], Mapping) else given
    for one in conversations:
        if not (isinstance(one, list | tuple) and all(isinstance(m, Mapping) for m in one)):
            raise RequestError(
                f"messages: {shown(one)} is no list of messages; "
                "hint: [{'role': 'user', 'content': '…'}]",
                "messages",
            )
    return list(conversations)


def _changed(params: SamplingParams, changes: Mapping[str, Any]) -> SamplingParams:
    """The parameters with changes, each of its type."""
    fields = msgspec.structs.asdict(params)
    for name in changes:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1)
            hint = f"did you mean {near[0]}?" if near else f"the parameters are {', '.join(fields)}"
            raise RequestError(f"unknown sampling parameter {name!r}; hint: {hint}", name)
    fields |= changes
    for name, value in fields.items():
        field_type = _FIELD_TYPES[name]
        try:
            fields[name] = msgspec.convert(value, field_type)
        except msgspec.ValidationError as error:
            raise RequestError(f"{name}: {error} (got {shown(value)})", name) from error
    return SamplingParams(**fields)


_FIELD_TYPES = {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}


@dataclass(frozen=True, slots=True)
class LoadedText:
    """A model as far as text and configuration go; `config.model` is a path."""

    config: EngineConfig
    text: TextTools
    default_sampling: SamplingParams

    @classmethod
    def of(
        cls,
        options: dict[str, Any],
        chat_template: str,
        generation_config: Literal["auto", "none"],
        report: Report,
    ) -> LoadedText:
        """Check options, find the model (or fetch it), and read its tokenizer and template."""
        config = resolve_engine({"log_level": "warning"} | options)
        source = resolve_source(config.model, report)
        report("reading the tokenizer", 0, 0)
        text = load_text_side(
            source.gguf.metadata if source.is_gguf else source.path, chat_template
        )
        sampling = source.default_sampling if generation_config == "auto" else DefaultSampling()
        if sampling.not_applied:
            log.warning(
                f"the sampling of {sampling.origin} is not applied as a whole",
                not_applied=", ".join(sampling.not_applied),
            )
        return cls(config.model_copy(update={"model": str(source.path)}), text, sampling.params)

    def reader(self, info: EngineInfo) -> PromptReader:
        """Reads prompts for an engine that has started."""
        limits = TextLimits(info.max_model_len, info.vocab)
        return PromptReader(self.text, self.default_sampling, limits)
