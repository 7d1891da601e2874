"""Which tasks there are, and which were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bifolio.errors import ConfigError
from bifolio.lab.eval.items import Task
from bifolio.lab.eval.tasks.arithmetic import arithmetic
from bifolio.lab.eval.tasks.coding import coding
from bifolio.lab.eval.tasks.copying import copying
from bifolio.lab.eval.tasks.local import local_tasks
from bifolio.lab.eval.tasks.retrieval import retrieval
from bifolio.lab.eval.tasks.slovak import slovak
from bifolio.lab.eval.tasks.task_files import file_tasks
from bifolio.lab.eval.tasks.tools import tools


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
