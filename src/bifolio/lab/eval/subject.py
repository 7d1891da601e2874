"""What is judged: one engine under one plan, asked items one set at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bifolio.checkpoint.source import ModelSource, resolve_source
from bifolio.config import EngineConfig
from bifolio.engine.engine import Engine
from bifolio.errors import ConfigError, IntegrityError
from bifolio.formats import PrecisionPlan
from bifolio.lab.eval.forced import ForcedText
from bifolio.request import FinishReason, Output, Request, SamplingParams
from bifolio.spec import PageSpec
from bifolio.text.tokenizer_files import TextTools, load_text_side

SEATS = 32
"""Requests that run together. Results do not depend on it."""
_LEAST_CACHE = 2**28


@dataclass(frozen=True, slots=True)
class Setup:
    """How to build a subject: `kernels` as for serve, `threads` 0 for the default.

    ConfigError if the plan cannot be read: before any engine is built.
    """

    model: str
    plan: str
    kernels: str = "auto"
    threads: int = 0

    def __post_init__(self) -> None:
        PrecisionPlan.parse(self.plan)

    def config(self, source: ModelSource, tokens: int) -> EngineConfig:
        """An engine with room for a request of `tokens` tokens in every seat, or nearly."""
        plan = PrecisionPlan.parse(self.plan)
        page = PageSpec.of(source.spec, plan.prefill.cache, plan.page_size)
        longest = page.pages_for(tokens) * page.page_bytes
        return EngineConfig.of(
            model=self.model,
            plan=plan,
            kernels=self.kernels,
            threads=self.threads,
            max_model_len=tokens,
            cache_memory=max(_LEAST_CACHE, 4 * longest),
            max_num_seqs=SEATS,
            prefix_cache=False,
            log_level="warning",
        )


class SubjectTokenizer:
    """A model's tokenizer, found without building an engine. `digest` names its behaviour."""

    def __init__(self, model: str) -> None:
        self.source = resolve_source(model)
        where = self.source.gguf.metadata if self.source.is_gguf else self.source.path
        self.side: TextTools = load_text_side(where)

    def prompt_ids(self, prompt: str, chat: bool) -> list[int]:
        """Ids of a plain prompt, or of it as the user's message in the model's chat template."""
        tokenizer = self.side.tokenizer
        if not chat:
            return tokenizer.encode(prompt, add_special_tokens=True)
        if self.side.template is None:
            raise ConfigError("this model has no chat template; leave --chat away")
        rendered = self.side.template.render([{"role": "user", "content": prompt}])
        return tokenizer.encode(rendered.text, guard=rendered.guard)

    def continuation_ids(self, prompt_ids: Sequence[int], prompt: str, text: str) -> list[int]:
        """Ids of `text` after a plain prompt: those by which the whole is longer.

        Where the border of the two is no border of tokens, ids of the text alone.
        """
        whole = self.side.tokenizer.encode(prompt + text, add_special_tokens=False)
        prefix = list(self.side.tokenizer.prefix)
        bare = [*prefix, *whole]
        if bare[: len(prompt_ids)] == list(prompt_ids):
            return bare[len(prompt_ids) :]
        return self.side.tokenizer.encode(text)


def digest_ids(prompts: Sequence[Sequence[int]]) -> str:
    """SHA-256 of lists of token ids: equal exactly if every id of every prompt is."""
    return hashlib.sha256(json.dumps([list(ids) for ids in prompts]).encode()).hexdigest()


@dataclass(slots=True)
class Generated:
    """One answer: token ids, its text up to the stop text, and how it ended."""

    tokens: list[int]
    text: str
    ended: str
    cached_tokens: int


class Subject:
    """An engine of its own. `engine` may be handed in, for fault injection."""

    def __init__(
        self, setup: Setup, texts: SubjectTokenizer, tokens: int, engine: Engine | None = None
    ):
        self.setup = setup
        self._texts = texts
        self.engine = engine or Engine(setup.config(texts.source, tokens))
        self._round = 0

    def forced(self) -> ForcedText:
        """Scores given continuations. Between two calls of it the engine may generate."""
        return ForcedText(self.engine)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        stop: Sequence[str],
        on_answer: Callable[[], None] = lambda: None,
    ) -> list[Generated]:
        """Greedy answers, in the order of the prompts. An integrity fault ends the evaluation.

        `on_answer` is called at the end of each answer.
        """
        self._round += 1
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        found: dict[str, Generated] = {}
        for i, prompt in enumerate(prompts):
            name = f"{self._round}-{i}"
            found[name] = Generated([], "", "", 0)
            self.engine.add(Request(id=name, prompt_ids=list(prompt), sampling=sampling))
            while len(found) - sum(bool(g.ended) for g in found.values()) >= 2 * SEATS:
                self._advance(found, stop, on_answer)
        while self.engine.has_work:
            self._advance(found, stop, on_answer)
        return list(found.values())

    def _advance(
        self, found: dict[str, Generated], stop: Sequence[str], on_answer: Callable[[], None]
    ) -> None:
        for output in self.engine.step():
            if found[output.id].ended:
                continue
            if self._take(found[output.id], output, stop):
                self.engine.abort(output.id)
            if found[output.id].ended:
                on_answer()

    def _take(self, answer: Generated, output: Output, stop: Sequence[str]) -> bool:
        """Add news to an answer; whether the request is to be ended for a stop text."""
        if output.finish is FinishReason.ERROR:
            raise IntegrityError(f"a request failed while evaluating: {output.error}")
        answer.tokens += output.tokens
        answer.cached_tokens = output.cached_tokens
        tokenizer = self._texts.side.tokenizer
        answer.text = tokenizer.decode(answer.tokens, skip_special_tokens=True)
        places = [at for text in stop if (at := answer.text.find(text)) >= 0]
        if places:
            answer.text, answer.ended = answer.text[: min(places)], "stop"
            return output.finish is None
        if output.finish is not None:
            answer.ended = str(output.finish)
        return False
