"""Check the prose of code and docs for words that this project does not use: `check_prose.py`.

Reads comments, docstrings and other strings of `src`, `docs` and the README; not the CHANGELOG, and
not `docs/results`, which are records. Words and phrases are compared whole, regardless of case.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

AVOID = {
    "equal beginnings": "prefix caching",
    "cure": "hint",
    "is no address": "invalid address '…': expected …",
    "stands twice": "duplicate",
    "served are": "endpoints: …",
    "one is too many": "say what is duplicate",
    "whatever": "every, any, regardless of",
    "so many": "that many, or the number",
    "so many times": "that many times",
    "anew": "again",
    "its like": "name it, or 'and the like'",
    "goes on": "continues, resumes",
    "go on": "continue, resume",
    "behind": "after",
    "nobody": "no client, no request, no one",
    "told": "reported, given, known",
    "an end for": "request timeout",
    "door": "listener",
    "pulse": "heartbeat",
    "twin": "copy, duplicate, reference",
    "patience": "timeout",
}
"""What to avoid, and what to write instead."""

ALLOWED = [
    # In the sense of networks: a client cannot see it.
    r"behind (?:a|an|the|its|such a|one|your) (?:\w+ )?(?:router|proxy|proxies|actor|key|firewall)",
    r"behind a name",
    r"falls behind",
    # Words of tasks and of filler text.
    r'^"door"$',
    r"level office door health",
    # The user of the operating system.
    r"runs as nobody, if nobody",
    r"user `nobody`",
    r"no file, no thread and no handshake, nobody",
]
"""Places where a word above is the right one, as regular expressions over the line."""


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file that people read: all of a document, comments and strings of code."""
    text = path.read_text("utf-8")
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            for i, line in enumerate(token.string.splitlines()):
                yield token.start[0] + i, line


def main() -> int:
    """Print each word to avoid with its place and a better one; exit status 1 if there is any."""
    pattern = re.compile(rf"\b({'|'.join(sorted(AVOID, key=len, reverse=True))})\b", re.IGNORECASE)
    allowed = re.compile("|".join(ALLOWED), re.IGNORECASE)
    documents = [p for p in (ROOT / "docs").rglob("*.md") if "results" not in p.parts]
    found = 0
    for path in [*sorted((ROOT / "src").rglob("*.py")), *sorted(documents), ROOT / "README.md"]:
        for number, line in prose(path):
            for match in pattern.finditer(allowed.sub("", line)):
                word = match[1].lower()
                print(f"{path.relative_to(ROOT)}:{number}: {word!r}: write {AVOID[word]}")
                found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
