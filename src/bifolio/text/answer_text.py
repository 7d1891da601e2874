"""From the tokens of a sequence to the text of an answer, for the server and for `bifolio.llm`.

A prompt with `n` answers is `n` sequences in the engine. `sequence_params` says how each is
sampled; `AnswerText` turns its outputs into pieces of text: stop strings, special tokens and
incomplete characters are handled there (`text.detokenizer`).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

import msgspec

from bifolio.errors import GenerationError
from bifolio.request import ErrorCode, FinishReason, Output, SamplingParams, TokenLogprobs
from bifolio.text.detokenizer import Detokenizer
from bifolio.text.tokenizer import Tokenizer

RANDOM_SEED = -1
"""A seed that asks for a random one, as in vLLM and llama.cpp."""


def resolve_params(params: SamplingParams) -> SamplingParams:
    """The same with a seed below 2**64, drawn if there is none, and a `top_k` that is not -1."""
    seed = params.seed
    seed = secrets.randbits(64) if seed is None or seed == RANDOM_SEED else seed % 2**64
    top_k = 0 if params.top_k == -1 else params.top_k
    return msgspec.structs.replace(params, seed=seed, top_k=top_k)


def sequence_params(params: SamplingParams, choice: int, end_ids: Iterable[int]) -> SamplingParams:
    """How the engine samples answer `choice` to a prompt: resolved parameters of one sequence.

    `end_ids` are the tokenizer's own end tokens, which the engine does not know.
    """
    own = () if params.ignore_eos else end_ids
    return msgspec.structs.replace(
        params,
        n=1,
        seed=choice_seed(params.seed or 0, choice),
        stop=(),
        stop_token_ids=tuple(sorted({*params.stop_token_ids, *own})),
    )


def choice_seed(seed: int, index: int) -> int:
    """Seed of answer `index` to a prompt: the request's own for the first, far ones for others."""
    return (seed + index * 0x9E3779B97F4A7C15) % 2**64


def generation_error(output: Output, hint_of_late: str) -> GenerationError:
    """The error that an output reports. Whose time limit has passed the engine cannot say."""
    text = output.error or "the request was ended"
    if output.error_code is ErrorCode.DEADLINE:
        text += f"; {hint_of_late}"
    return GenerationError(text, output.error_code or ErrorCode.INTERNAL)


class AnswerPiece(msgspec.Struct, frozen=True):
    """A part of one answer; the parts in order, joined, are the answer.

    `logprobs` belong to `token_ids`, one for each, also to those of a stop. `prompt_logprobs` are
    in the first parts, for each position of the prompt; that of its first token is None.

    `finish_reason` of the last part is `stop` or `length`; `stop_reason` the stop string, or the id
    of a stop token that the request named, else None.
    """

    index: int
    """Which of the answers."""
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] | None
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def is_admission(self) -> bool:
        """Without news of the answer itself: the engine has put the request in line."""
        return not (self.token_ids or self.text or self.finish_reason or self.prompt_logprobs)


class AnswerText:
    """One answer in the making: its outputs become pieces, its tokens are counted."""

    def __init__(self, index: int, tokenizer: Tokenizer, params: SamplingParams) -> None:
        stops = [params.stop] if isinstance(params.stop, str) else params.stop
        self.index = index
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.pages_checked = 0
        self.worker = ""
        self._detokenizer = Detokenizer(
            tokenizer,
            [stop for stop in stops if stop],
            skip_special_tokens=params.skip_special_tokens,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        self._named_stops = frozenset(params.stop_token_ids)
        self._include_stop = params.include_stop_str_in_output

    def take(self, output: Output) -> AnswerPiece:
        """What an output adds.

        A finish of the piece ends the answer, also if more tokens come: where the output has none,
        the request must be aborted.
        """
        tokens = output.tokens
        # The end token is counted, and its text is no part of the answer.
        ends = output.stop_id is not None and bool(tokens) and not self._include_stop
        text, used, stop = self._detokenizer.push(tokens, hide_last=ends)
        finish: str | None = None
        stop_reason: str | int | None = stop
        if stop is not None:
            finish = FinishReason.STOP.value
            tokens = tokens[:used]
        elif output.finish is not None:
            finish = output.finish.value
            text += self._detokenizer.finish()
            if output.stop_id in self._named_stops:
                stop_reason = output.stop_id
        self.completion_tokens += len(tokens)
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        self.pages_checked = max(self.pages_checked, output.pages_checked)
        self.worker = output.worker or self.worker
        logprobs = None if output.logprobs is None else output.logprobs[: len(tokens)]
        return AnswerPiece(
            self.index, text, tokens, logprobs, output.prompt_logprobs, finish, stop_reason
        )
