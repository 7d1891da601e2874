"""Reads and checks tool calls: name, arguments, schema. Types and answers in BFCL's form.

BFCL: Berkeley function calling leaderboard. A right answer lists, for each call, its function and
for each argument the values that are accepted; "" among them means that it may be left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bifolio.lab.eval.items import Item, Judgement

NO_CALL = "none"
"""What a model is asked to answer where no tool fits."""
_KINDS: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "float": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "array": (list,),
    "tuple": (list,),
    "object": (dict,),
    "dict": (dict,),
}


@dataclass(frozen=True, slots=True)
class Call:
    """A function's name and its arguments."""

    name: str
    arguments: Mapping[str, Any]


def read_calls(text: str) -> list[Call] | None:
    """The calls of an answer: JSON objects with name and arguments, alone or in one array.

    An empty list for the answer `none`; None where neither can be read. Text around them (a code
    fence, `<tool_call>`) is passed over.
    """
    if re.match(rf"\W*{NO_CALL}\b", text, re.IGNORECASE):
        return []
    decoder, calls, at = json.JSONDecoder(), [], 0
    while (found := re.search(r"[\[{]", text[at:])) is not None:
        at += found.start()
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        for one in value if isinstance(value, list) else [value]:
            call = _call(one)
            if call is None:
                return None
            calls.append(call)
    return calls or None


def _call(value: Any) -> Call | None:
    if not isinstance(value, dict):
        return None
    value = value.get("function", value)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return Call(value["name"], arguments) if isinstance(arguments, dict) else None


def obeys_schema(call: Call, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the call names a tool that was offered and its arguments fit that tool's schema."""
    schema = next((t.get("parameters", {}) for t in tools if t["name"] == call.name), None)
    return schema is not None and _fits(dict(call.arguments), schema)


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    if not _is_kind(value, schema.get("type", "")):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, dict):
        known = schema.get("properties", {})
        missing = set(schema.get("required", ())) - set(value)
        unknown = set(value) - set(known) if known else set()
        parts = all(_fits(part, known.get(name, {})) for name, part in value.items())
        return parts and not missing and not unknown
    if isinstance(value, list):
        return all(_fits(part, schema.get("items", {})) for part in value)
    return True


def _is_kind(value: Any, name: str) -> bool:
    """Whether a value has a JSON Schema (or BFCL) type; unknown types hold anything."""
    kinds = _KINDS.get(name)
    if kinds is None:
        return True
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def right_calls(calls: Sequence[Call], truth: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the calls are those of BFCL's ground truth, in any order."""
    left = list(truth)
    for call in calls:
        match = next((want for want in left if _is(call, want)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def _is(call: Call, want: Mapping[str, Any]) -> bool:
    accepted = want.get(call.name)
    if accepted is None or not set(call.arguments) <= set(accepted):
        return False
    return all(
        _one_of(call.arguments[name], values) if name in call.arguments else "" in values
        for name, values in accepted.items()
    )


def _one_of(value: Any, accepted: Sequence[Any]) -> bool:
    return any(_same(value, one) for one in accepted)


def _same(value: Any, wanted: Any) -> bool:
    """Equal as BFCL reads it: strings without case, spaces and punctuation, 5 and 5.0 alike."""
    if isinstance(value, str) and isinstance(wanted, str):
        return _plain(value) == _plain(wanted)
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(_same, value, wanted))
    if isinstance(value, dict) and isinstance(wanted, dict):
        if not set(value) <= set(wanted):
            return False
        return all(
            _one_of(value[name], options if isinstance(options, list) else [options])
            if name in value
            else isinstance(options, list) and "" in options
            for name, options in wanted.items()
        )
    if isinstance(value, bool) or isinstance(wanted, bool):
        return value is wanted
    return bool(value == wanted)


def _plain(text: str) -> str:
    return re.sub(r"[ ,./\-_*^']", "", text).lower().replace('"', "")


def judge_calls(item: Item, text: str) -> Judgement:
    """Right if the calls are the wanted ones; if none is wanted, right if there is none.

    Facts: `tools`, and `truth` (BFCL's ground truth; empty: no call; None: any call will do).
    """
    calls = read_calls(text)
    if calls is None:
        return Judgement(None, False)
    truth = item.facts["truth"]
    if truth is None:
        right = any(obeys_schema(call, item.facts["tools"]) for call in calls)
    else:
        right = right_calls(calls, truth)
    seen = json.dumps([{"name": c.name, "arguments": c.arguments} for c in calls])
    return Judgement(seen, right)


def measures(
    items: Sequence[Item], reference: Sequence[str], candidate: Sequence[str]
) -> dict[str, float | None]:
    """The two measures that vendors of one model are held to, of the raw answers of both sides.

    `schema_accuracy`: share of the tool calls that obey their schema. `trigger_f1`: does the
    candidate call a tool for the same prompts as the reference? F1 with the reference as the truth.
    None where nothing was called.
    """
    called = [[_triggered(text) for text in side] for side in (reference, candidate)]
    both = sum(r and c for r, c in zip(*called, strict=True))
    either = sum(map(sum, called))
    return {
        "schema_accuracy_reference": _schema_accuracy(items, reference),
        "schema_accuracy_candidate": _schema_accuracy(items, candidate),
        "trigger_f1": 2 * both / either if either else None,
    }


def _triggered(text: str) -> bool:
    """Whether an answer tries to call, be it readable or not."""
    calls = read_calls(text)
    return bool(calls) if calls is not None else "{" in text


def _schema_accuracy(items: Sequence[Item], answers: Sequence[str]) -> float | None:
    fits = [
        calls is not None and all(obeys_schema(call, item.facts["tools"]) for call in calls)
        for item, text in zip(items, answers, strict=True)
        if _triggered(text)
        for calls in [read_calls(text)]
    ]
    return sum(fits) / len(fits) if fits else None
