"""Which tasks there are, and which were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bifolio.errors import ConfigError
from bifolio.evals.items import Task
from bifolio.evals.tasks.arithmetic import arithmetic
from bifolio.evals.tasks.coding import coding
from bifolio.evals.tasks.copying import copying
from bifolio.evals.tasks.files import file_tasks
from bifolio.evals.tasks.local import local_tasks
from bifolio.evals.tasks.retrieval import retrieval
from bifolio.evals.tasks.slovak import slovak
from bifolio.evals.tasks.tools import tools


def built_in(items: int, seed: int) -> list[Task]:
    """The sets written for this project, `items` of each where they are drawn by rule."""
    drawn = (copying, retrieval, arithmetic, tools, coding)
    return [*(task for make in drawn for task in make(items, seed)), *slovak()]


def available(items: int, seed: int, data: Path | None, files: Sequence[Path]) -> list[Task]:
    """The tasks of `files` and of the folder `data`, or if neither is given the built-in ones."""
    found = [task for path in files for task in file_tasks(path)]
    if data is not None:
        found += local_tasks(data, items)
    return found or built_in(items, seed)


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
