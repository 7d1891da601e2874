"""Tool calls, their results and tools as plain text, for templates that have no form for them.

The form is that of Hermes models, which many other models have seen:

    <tool_call>
    {"id": "c1", "name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def calls_as_text(content: str | None, calls: Sequence[Mapping[str, Any]]) -> str:
    """An assistant's text followed by its tool calls; arguments that are no JSON as a string."""
    blocks = [
        _block(
            "tool_call",
            {"id": call.get("id")}
            | {key: call["function"].get(key) for key in ("name", "arguments")},
        )
        for call in calls
    ]
    return "\n".join([content, *blocks] if content else blocks)


def result_as_text(message: Mapping[str, Any]) -> str:
    """What a tool answered, for a message of the user."""
    fields = {key: message.get(key) for key in ("tool_call_id", "name", "content")}
    return _block("tool_response", fields)


def tools_as_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """The functions that a model may call, for a system message."""
    return "\n".join(
        [
            "# Tools",
            "",
            "You have these functions, one JSON object per line:",
            "<tools>",
            *(json.dumps(tool, ensure_ascii=False) for tool in tools),
            "</tools>",
            "",
            "A call of a function is a JSON object with its name and arguments:",
            "<tool_call>",
            '{"name": <name of the function>, "arguments": <object with its arguments>}',
            "</tool_call>",
        ]
    )


def _block(name: str, fields: Mapping[str, Any]) -> str:
    present = {key: value for key, value in fields.items() if value is not None}
    return f"<{name}>\n{json.dumps(present, ensure_ascii=False)}\n</{name}>"
