"""Reads numbers, letters and contained answers out of what a model wrote."""

from __future__ import annotations

import re

from bifolio.lab.eval.items import Item, Judgement

_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?"
_FINAL = re.compile(rf"(?:####|answer is:?|\\boxed\{{)\s*\**\s*\$?({_NUMBER})", re.IGNORECASE)


def read_number(text: str) -> str | None:
    """The final number of a worked answer: after `####`, "answer is" or in a box, else the last.

    The last such mark counts, since a model may recite an example or correct itself. Currency
    signs, thousands separators and a trailing `.0` are dropped.
    """
    marked = _FINAL.findall(text)
    found = marked or re.findall(_NUMBER, text)
    if not found:
        return None
    plain: str = found[-1].replace("$", "").replace(",", "")
    if "." in plain:
        plain = plain.rstrip("0").rstrip(".")
    return plain


def judge_number(item: Item, text: str) -> Judgement:
    """Right if the final number is the expected one."""
    found = read_number(text)
    return Judgement(found, found is not None and found == read_number(item.expected))


def judge_contains(item: Item, text: str) -> Judgement:
    """Right if every text of the fact `answers` occurs in the answer."""
    answers = item.facts["answers"]
    return Judgement(text.strip() or None, all(answer in text for answer in answers))
