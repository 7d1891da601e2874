"""Finds the results in a folder and tells what each is; what is missing is named, not an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bifolio.errors import ConfigError, cause_of
from bifolio.input_files import LARGE_BYTES, parse_json, read_text, visible
from bifolio.lab.bench.bench_results import KIND, SCHEMA
from bifolio.wording import cut

_EVAL = "bifolio.eval/"

Document = dict[str, Any]

_DAMAGED = (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError)
"""What a value that is missing or of another type comes to where a page is made of it."""


@dataclass(slots=True)
class Documents:
    """Results by kind, in the order of their paths; `skipped` says why others do not count."""

    plans: list[Document] = field(default_factory=list)
    benches: list[Document] = field(default_factory=list)
    evals: list[Document] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def add(self, one: Documents, name: str) -> None:
        """Take over the result of a file."""
        self.plans += one.plans
        self.benches += one.benches
        self.evals += one.evals
        self.files.append(name)

    @property
    def missing(self) -> list[str]:
        """Commands that would add what is not there."""
        return [
            line
            for found, line in (
                (self.plans, "no plan: `bifolio plan --model … --out DIR`"),
                (self.benches, "no benchmark: `bifolio bench compare … --out DIR`"),
                (self.evals, "no evaluation: `bifolio eval tasks … --out DIR`"),
            )
            if not found
        ]


def read_documents(folder: Path, show: Callable[[Documents], object] = repr) -> Documents:
    """All JSON files of a folder and of the folders in it; ConfigError if none is a result.

    `show` makes a page of one result. Where it cannot, the result is damaged and skipped.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; make results with --out {folder} first")
    found = Documents()
    for path in _files(folder):
        name = str(path.relative_to(folder))
        try:
            document = parse_json(read_text(path, LARGE_BYTES))
        except (OSError, ValueError) as error:
            found.skipped.append(f"{name} cannot be read: {cause_of(error)}")
            continue
        alone = Documents(skipped=found.skipped)
        if not isinstance(document, dict) or not _sort_in(document, name, alone):
            continue
        try:
            show(alone)
        except _DAMAGED as error:
            what = cut(f"{type(error).__name__}: {error}")
            found.skipped.append(f"{name} is not as bifolio wrote it ({what})")
            continue
        found.add(alone, name)
    if not (found.plans or found.benches or found.evals):
        raise ConfigError(
            f"{folder} holds no results. "
            + "; ".join(found.missing).replace("DIR", str(folder)).capitalize()
        )
    return found


def _files(folder: Path) -> Iterator[Path]:
    yield from visible(folder, "*.json")
    yield from (p for p in visible(folder, "*/*.json") if p.parent.name != "aiperf")


def _sort_in(document: Document, name: str, found: Documents) -> bool:
    if document.get("kind") == KIND:
        if document.get("schema") != SCHEMA:
            found.skipped.append(f"{name} has schema {document.get('schema')}, not {SCHEMA}")
            return False
        found.benches.append(document)
    elif str(document.get("schema", "")).startswith(_EVAL):
        found.evals.append(document)
    elif "on_workload" in document and "phases" in document:
        found.plans.append(document)
    else:
        return False
    return True
