"""A small set of tool calls: requests with one right call, and requests that no tool fits."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from bifolio.lab.eval.items import Item, Task
from bifolio.lab.eval.tasks.tool_calls import NO_CALL, judge_calls, measures

_CITIES = ("Bratislava", "Oslo", "Lisbon", "Nairobi", "Lima", "Osaka", "Košice", "Dublin")
_NAMES = ("Jana", "Peter", "Amina", "Marek", "Ingrid", "Zuzana", "Omar", "Lucia")
_TITLES = ("dentist", "team lunch", "piano lesson", "tax return", "car inspection", "parents' day")
_CURRENCIES = ("EUR", "USD", "CZK", "JPY", "GBP")
_OFF_TOPIC = (
    "Write a short poem about {city}.",
    "Why is the sky over {city} blue?",
    "What is a good name for a cat that belongs to {name}?",
    "Explain to {name} what a prime number is.",
    "Tell {name} a joke about {title} appointments.",
)


def _tool(name: str, description: str, required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "name": name,
        "description": description,
        "parameters": {"type": "object", "properties": properties, "required": required},
    }


_TEXT, _INTEGER = {"type": "string"}, {"type": "integer"}
_TOOLS = {
    tool["name"]: tool
    for tool in (
        _tool(
            "get_weather",
            "Forecast for a city.",
            ["city", "days"],
            city=_TEXT,
            days=_INTEGER,
            unit={"type": "string", "enum": ["celsius", "fahrenheit"]},
        ),
        _tool(
            "convert_money",
            "Convert an amount between currencies.",
            ["amount", "source", "target"],
            amount={"type": "number"},
            source={"type": "string", "enum": list(_CURRENCIES)},
            target={"type": "string", "enum": list(_CURRENCIES)},
        ),
        _tool(
            "send_message", "Send a text message.", ["to", "text"], to=_TEXT, text=_TEXT
        ),
        _tool(
            "add_event", "Put an event into the calendar.", ["title", "day", "hour"],
            title=_TEXT, day=_INTEGER, hour=_INTEGER,
        ),
    )
}  # fmt: skip

TaskOptions = tuple[str, dict[str, Any]]
"""What a user says, and the arguments of the right call: accepted values of each."""


def _weather(draw: random.Random) -> TaskOptions:
    city, days = draw.choice(_CITIES), draw.randint(2, 9)
    text = f"What will the weather in {city} be like over the next {days} days?"
    return text, {"city": [city], "days": [days], "unit": ["celsius", "fahrenheit", ""]}


def _money(draw: random.Random) -> TaskOptions:
    source, target = draw.sample(_CURRENCIES, 2)
    amount = draw.randrange(10, 5000)
    text = f"How much is {amount} {source} in {target}?"
    return text, {"amount": [amount], "source": [source], "target": [target]}


def _message(draw: random.Random) -> TaskOptions:
    name, title = draw.choice(_NAMES), draw.choice(_TITLES)
    return f'Send {name} the message "the {title} is moved".', {
        "to": [name],
        "text": [f"the {title} is moved"],
    }


def _event(draw: random.Random) -> TaskOptions:
    title, day, hour = draw.choice(_TITLES), draw.randint(1, 28), draw.randint(8, 19)
    return f"Put the {title} into my calendar on day {day} at {hour} o'clock.", {
        "title": [title],
        "day": [day],
        "hour": [hour],
    }


_ASKS: dict[str, Callable[[random.Random], TaskOptions]] = {
    "get_weather": _weather,
    "convert_money": _money,
    "send_message": _message,
    "add_event": _event,
}


def tools(count: int, seed: int) -> list[Task]:
    """`tools`: one call each, or for one in five none. All four tools are always on offer."""
    draw = random.Random(f"tools {seed}")
    offered = list(_TOOLS.values())
    head = tool_prompt_head(offered) + "".join(
        f"User: {text}\nCall: {json.dumps({'name': name, 'arguments': _first(arguments)})}\n\n"
        for name, make in list(_ASKS.items())[:2]
        for text, arguments in [make(draw)]
    )
    head += f"User: {_off_topic(draw)}\nCall: {NO_CALL}\n\n"
    items = []
    for i in range(count):
        name = None if i % 5 == 4 else list(_ASKS)[i % 5]
        text, arguments = _ASKS[name](draw) if name else (_off_topic(draw), {})
        right = {"name": name, "arguments": _first(arguments)}
        items.append(
            Item(
                id=f"tools-{i}",
                prompt=f"{head}User: {text}\nCall:",
                expected=json.dumps(right, ensure_ascii=False) if name else NO_CALL,
                group=name or "no tool fits",
                facts={"tools": offered, "truth": [{name: arguments}] if name else []},
            )
        )
    return [
        Task(
            "tools",
            tuple(items),
            judge_calls,
            f"built in, seed {seed}",
            chance=0.2,  # answering `none` throughout
            max_tokens=64,
            measure=measures,
        )
    ]


def tool_prompt_head(offered: list[dict[str, Any]]) -> str:
    """Says which tools there are and how to call one, for a model without a template for tools."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in offered)
    return (
        f"Tools:\n{lines}\n\nAnswer each request with one JSON object for each call, with name and "
        f"arguments, or with the word {NO_CALL} where no tool fits.\n\n"
    )


def _first(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: values[0] for name, values in arguments.items() if "" not in values}


def _off_topic(draw: random.Random) -> str:
    return draw.choice(_OFF_TOPIC).format(
        city=draw.choice(_CITIES), name=draw.choice(_NAMES), title=draw.choice(_TITLES)
    )
