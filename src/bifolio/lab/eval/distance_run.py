"""A whole measurement of distance: texts by language, contexts by length, the reference's noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Any

from bifolio.errors import ConfigError, cause_of
from bifolio.input_files import DATA_BYTES, read_text, visible
from bifolio.lab.eval.answers import Progress, silent
from bifolio.lab.eval.distance import DistanceRow, Scored, Window, row, score, windows
from bifolio.lab.eval.eval_results import side
from bifolio.lab.eval.subject import Setup, Subject, SubjectTokenizer, digest_ids
from bifolio.lab.eval.task_run import BuildSubject
from bifolio.lab.eval.tasks.local import read_rows
from bifolio.wording import plural

_BUILT_IN = ("en", "sk")


class Floor(StrEnum):
    """What the reference is compared with to find its own noise."""

    KERNELS = "kernels"
    """The same plan on the other kernel set."""
    FP32 = "fp32"
    """The plan fp32/fp32: how far bf16 itself is from the numbers of the checkpoint."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Passage:
    """A text to score."""

    name: str
    language: str
    text: str


@dataclass(frozen=True, slots=True)
class MeasuredDistance:
    """One candidate's distance; rows by text and context, then each text's, then all."""

    reference: dict[str, Any]
    candidate: dict[str, Any]
    floor: dict[str, Any] | None
    prompts_digest: str
    rows: list[DistanceRow]


def built_in_passages() -> list[Passage]:
    """A story in English and the same in Slovak, written for this project."""
    folder = resources.files("bifolio.lab.eval.texts")
    return [
        Passage(f"story {language}", language, (folder / f"{language}.txt").read_text("utf-8"))
        for language in _BUILT_IN
    ]


def local_passages(folder: Path) -> list[Passage]:
    """Texts of a data folder: WikiText-2 (test, raw) and NTREX in English and Slovak."""
    found = []
    plain = folder / "text" / "wikitext2_raw_test.txt"
    if plain.exists():
        found.append(read_passage(plain, "en"))
    for path in visible(folder / "slovak", "ntrex*.jsonl"):
        rows = read_rows(path)
        for language in _BUILT_IN:
            text = "\n".join(row[language] for row in rows)
            found.append(Passage(f"ntrex {language}", language, text))
    if not found:
        raise ConfigError(
            f"{folder} holds no text that --data knows (text/wikitext2_raw_test.txt, "
            "slovak/ntrex*.jsonl); name text files instead"
        )
    return found


def read_passage(path: Path, language: str = "") -> Passage:
    """A UTF-8 text file; ConfigError if it cannot be read as such."""
    try:
        return Passage(path.name, language, read_text(path, DATA_BYTES, pipe=True))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path} as UTF-8 text: {cause_of(error)}") from error


@dataclass(frozen=True, slots=True)
class DistanceRun:
    """`count` windows at each length of `contexts`, with `scored` tokens after each."""

    passages: Sequence[Passage]
    contexts: Sequence[int] = (64, 256, 768)
    scored: int = 64
    count: int = 8
    floor: Floor = Floor.KERNELS
    seed: int = 0

    def measure(
        self,
        reference: Setup,
        candidates: Sequence[Setup],
        texts: SubjectTokenizer,
        progress: Progress = silent,
        build: tuple[BuildSubject, BuildSubject] = (Subject, Subject),
    ) -> list[MeasuredDistance]:
        """Distances of all candidates. All engines live at once: each window is read by all."""
        cut = self._cut(texts)
        tokens = max(self.contexts) + self.scored
        base = build[0](reference, texts, tokens)
        setups = [*self._floor_setup(reference, base), *candidates]
        first = len(setups) - len(candidates)
        others = [build[int(i >= first)](setup, texts, tokens) for i, setup in enumerate(setups)]
        scorers = [other.forced() for other in others]
        found: dict[tuple[int, int], list[Scored]] = {}
        total = sum(_tokens(piece) for pieces in cut.values() for piece in pieces)
        done = 0

        def telling(what: str, pieces: Sequence[Window]) -> Iterator[Window]:
            nonlocal done
            for piece in pieces:
                progress(what, done, total)
                yield piece
                done += _tokens(piece)

        for (place, context), pieces in cut.items():
            count = plural(len(pieces), "window")
            what = f"{self.passages[place].name}, {count} after {context} tokens"
            found[place, context] = score(base.forced(), scorers, telling(what, pieces))
        digest = digest_ids([[*c, *s] for pieces in cut.values() for c, s in pieces])
        return [
            MeasuredDistance(
                reference=side(base),
                candidate=side(other),
                floor=side(others[0]) if first else None,
                prompts_digest=digest,
                rows=self._rows(
                    {
                        key: (all_of[i], all_of[0] if first else None)
                        for key, all_of in found.items()
                    }
                ),
            )
            for i, other in enumerate(others)
            if i >= first
        ]

    def _cut(self, texts: SubjectTokenizer) -> dict[tuple[int, int], list[Window]]:
        known = texts.source.spec.max_position
        cut = {}
        for i, passage in enumerate(self.passages):
            tokens = texts.side.tokenizer.encode(passage.text)
            for context in self.contexts:
                if context + self.scored > known:
                    raise ConfigError(
                        f"a context of {context} tokens and {self.scored} scored ones are more "
                        f"than the {known} positions that the model knows; give a smaller --context"
                    )
                try:
                    cut[i, context] = windows(tokens, context, self.scored, self.count)
                except ValueError as error:
                    raise ConfigError(
                        f"{passage.name}: {error}; give a longer text or a smaller --context"
                    ) from error
        return cut

    def _floor_setup(self, reference: Setup, base: Subject) -> list[Setup]:
        match self.floor:
            case Floor.NONE:
                return []
            case Floor.FP32:
                return [Setup(reference.model, "fp32/fp32", reference.kernels, reference.threads)]
        other = "native" if str(base.engine.kernels).startswith("reference") else "reference"
        return [Setup(reference.model, reference.plan, other, reference.threads)]

    def _rows(
        self, found: dict[tuple[int, int], tuple[Scored, Scored | None]]
    ) -> list[DistanceRow]:
        rows = []
        for (place, context), (scored, noise) in found.items():
            passage = self.passages[place]
            rows.append(row(passage.name, passage.language, context, scored, noise, self.seed))
        for place, passage in enumerate(self.passages):
            own = [pair for (at, _), pair in found.items() if at == place]
            rows.append(row(passage.name, passage.language, 0, *_joined(own), self.seed))
        if len(self.passages) > 1:
            rows.append(row("all", "", 0, *_joined(list(found.values())), self.seed))
        return rows


def _tokens(window: Window) -> int:
    return sum(map(len, window))


def _joined(pairs: Sequence[tuple[Scored, Scored | None]]) -> tuple[Scored, Scored | None]:
    scored, noise = pairs[0]
    for more, more_noise in pairs[1:]:
        scored = scored.joined(more)
        noise = None if noise is None or more_noise is None else noise.joined(more_noise)
    return scored, noise
