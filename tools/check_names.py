"""Check that every class and module outside tests has a name of its own: `check_names.py`.

A name that exists twice makes a search ambiguous and an import a guess. Names that start with two
underscores and package files (`__init__.py`, `__main__.py`) are not looked at.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALLOWED: dict[str, str] = {}
"""Names that may exist twice, and why."""


def main() -> int:
    """Print each name that is defined more than once; the exit status is 1 if there are any."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for folder in ("src", "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            where = str(path.relative_to(ROOT))
            if not path.name.startswith("__"):
                places["file", path.name].append(where)
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ClassDef):
                    places["class", node.name].append(f"{where}:{node.lineno}")
    repeated = {
        name: found for name, found in places.items() if len(found) > 1 and name[1] not in ALLOWED
    }
    for (kind, name), found in sorted(repeated.items()):
        print(f"{kind} {name} exists {len(found)} times: {', '.join(found)}")
    unused = sorted(set(ALLOWED) - {name for (_, name), found in places.items() if len(found) > 1})
    for name in unused:
        print(f"{name} is allowed to exist twice and does not: remove it from ALLOWED")
    return min(len(repeated) + len(unused), 1)


if __name__ == "__main__":
    sys.exit(main())
