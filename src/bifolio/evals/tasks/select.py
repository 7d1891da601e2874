"""Which tasks there are, and which were asked for."""

from __future__ import annotations

from collections.abc import Sequence

from bifolio.errors import ConfigError
from bifolio.evals.items import Task
from bifolio.evals.tasks.copying import copying
from bifolio.evals.tasks.retrieval import retrieval


def built_in(items: int, seed: int) -> list[Task]:
    """The sets written for this project, `items` of each where they are drawn by rule."""
    return [*copying(items, seed), *retrieval(items, seed)]


def chosen(tasks: Sequence[Task], names: Sequence[str]) -> list[Task]:
    """Tasks whose name is one of `names` or begins with one and a hyphen; all for no names."""
    if not names:
        return list(tasks)
    for name in names:
        if not any(_fits(task, name) for task in tasks):
            known = ", ".join(task.name for task in tasks)
            raise ConfigError(f"there is no task {name!r}; there are {known}")
    return [task for task in tasks if any(_fits(task, name) for name in names)]


def _fits(task: Task, name: str) -> bool:
    return task.name == name or task.name.startswith(f"{name}-")
