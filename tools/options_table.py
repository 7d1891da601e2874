"""docs/options.md, made from the settings of a server. `--check` says whether it is up to date.

python tools/options_table.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from bifolio.config import OTHER, SETTINGS, Setting, default_text, variable_of

PAGE = Path(__file__).parents[1] / "docs" / "options.md"

HEAD = """\
# Options of `bifolio serve`

Every setting of a server: its option, its key in a TOML file (`--config FILE.toml`), its
environment variable, its values and its default. The command line wins over the environment, the
environment over the file, the file over the default. Unknown keys of a file are errors.

Lists: the option may be repeated, the variable separates values by spaces, and the file takes the
plural of the key too (`api_keys = ["a", "b"]`). Sizes are written like `256MiB`, `2GB` or a number
of bytes. A server that `bifolio chat` or `bifolio bench --server` starts for itself takes no
settings from the environment.

This page is made by `tools/options_table.py` from `src/bifolio/config.py`; change it there.
"""


def values_of(setting: Setting, info: FieldInfo) -> str:
    """What may be given: choices, or the metavar, with bounds."""
    if get_origin(info.annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(info.annotation))
    if info.annotation is bool:
        return "`true`, `false`"
    bounds = {
        name: getattr(limit, name)
        for limit in info.metadata
        for name in ("ge", "gt", "le", "lt")
        if hasattr(limit, name)
    }
    signs = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}"}
    text = ", ".join(sign.format(bounds[name]) for name, sign in signs.items() if name in bounds)
    kind = "table" if setting.table else setting.metavar or "text"
    return f"{kind}, {text}" if text else kind


def row(key: str) -> str:
    """One line of a table."""
    setting, info = SETTINGS[key]
    name = setting.singular or key
    option = "–" if setting.table else f"`--{name.replace('_', '-')}`"
    variable = "–" if setting.table else f"`{variable_of(key)}`"
    if key == "model":
        option = "`MODEL`, the argument"
    default = default_text(setting, info) or ("required" if info.is_required() else "none")
    cells = (option, f"`{name}`", variable, values_of(setting, info), default, setting.help)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def page() -> str:
    """The whole page."""
    panels: dict[str, list[str]] = {OTHER: []}
    for key, (setting, _) in SETTINGS.items():
        panels.setdefault(setting.panel, []).append(row(key))
    titles = ("option", "key", "variable", "value", "default", "what it does")
    header = f"| {' | '.join(titles)} |\n|{' --- |' * len(titles)}\n"
    tables = [
        f"\n## {'Model and log' if panel == OTHER else panel}\n\n{header}" + "\n".join(rows) + "\n"
        for panel, rows in panels.items()
    ]
    return HEAD + "".join(tables)


def main() -> None:
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE} is out of date; run: python {' '.join(sys.argv[:1])}")


if __name__ == "__main__":
    main()
