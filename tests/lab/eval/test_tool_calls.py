"""Tool calls in the forms that models write them, judged as BFCL does."""

from __future__ import annotations

import json

import pytest

from bifolio.lab.eval.items import Item
from bifolio.lab.eval.tasks.tool_calls import (
    Call,
    judge_calls,
    measures,
    obeys_schema,
    read_calls,
    right_calls,
)
from bifolio.lab.eval.tasks.tools import tools

AREA = {
    "name": "area",
    "parameters": {
        "type": "dict",
        "properties": {
            "base": {"type": "integer"},
            "height": {"type": "float"},
            "unit": {"type": "string", "enum": ["m", "cm"]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["base", "height"],
    },
}
TRUTH = [{"area": {"base": [10], "height": [5.0], "unit": ["m", ""]}}]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "area", "arguments": {"base": 10, "height": 5}}',
        '[{"name": "area", "parameters": {"base": 10, "height": 5}}]',
        '```json\n{"name": "area", "arguments": {"base": 10, "height": 5}}\n```',
        '<tool_call>{"name": "area", "arguments": "{\\"base\\": 10, \\"height\\": 5}"}</tool_call>',
        '{"function": {"name": "area", "arguments": {"base": 10, "height": 5}}}',
    ],
)
def test_a_call_is_read_in_each_of_the_usual_forms(text: str) -> None:
    assert read_calls(text) == [Call("area", {"base": 10, "height": 5})]


@pytest.mark.parametrize(
    "text", ["", "I cannot", '{"name": "area"', '{"name": 3}', "[1, 2]", "{" * 9999]
)
def test_what_is_no_call_is_not_read(text: str) -> None:
    assert read_calls(text) is None


def test_none_is_an_answer() -> None:
    assert read_calls(" None.") == []
    assert read_calls("nonesuch") is None


@pytest.mark.parametrize(
    ("arguments", "obeys"),
    [
        ({"base": 1, "height": 2.5}, True),
        ({"base": 1, "height": 2}, True),
        ({"base": 1.5, "height": 2}, False),
        ({"base": True, "height": 2}, False),
        ({"base": 1}, False),
        ({"base": 1, "height": 2, "unit": "km"}, False),
        ({"base": 1, "height": 2, "colour": "red"}, False),
        ({"base": 1, "height": 2, "tags": ["a", "b"]}, True),
        ({"base": 1, "height": 2, "tags": ["a", 1]}, False),
    ],
)
def test_arguments_are_held_to_the_schema(arguments: dict, obeys: bool) -> None:
    assert obeys_schema(Call("area", arguments), [AREA]) is obeys
    assert not obeys_schema(Call("volume", arguments), [AREA])


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ({"base": 10, "height": 5}, True),
        ({"base": 10, "height": 5, "unit": "M"}, True),
        ({"base": 10, "height": 5, "unit": "cm"}, False),
        ({"base": 10}, False),
        ({"base": 10, "height": 5, "depth": 1}, False),
    ],
)
def test_a_right_call_has_accepted_values_and_may_leave_out_what_may_be(
    arguments: dict, right: bool
) -> None:
    assert right_calls([Call("area", arguments)], TRUTH) is right


def test_several_calls_come_in_any_order_and_each_once() -> None:
    truth = [{"f": {"x": [1]}}, {"f": {"x": [2]}}]
    one, two = Call("f", {"x": 1}), Call("f", {"x": 2})
    assert right_calls([two, one], truth)
    assert not right_calls([one, one], truth)
    assert not right_calls([one], truth)
    assert not right_calls([one, two, two], truth)


def test_true_is_not_one() -> None:
    assert not right_calls([Call("f", {"x": True})], [{"f": {"x": [1]}}])
    assert right_calls([Call("f", {"x": True})], [{"f": {"x": [True]}}])


def test_the_expected_answers_of_the_built_in_set_are_right_and_obey_their_schemas() -> None:
    (task,) = tools(40, seed=1)
    for item in task.items:
        assert judge_calls(item, item.expected).correct, item
        assert all(obeys_schema(c, item.facts["tools"]) for c in read_calls(item.expected) or [])
        assert not judge_calls(item, '{"name": "get_time", "arguments": {}}').correct
    assert sum(item.expected == "none" for item in task.items) == 8


def test_vendor_measures_compare_triggers_and_count_schema_errors() -> None:
    items = [Item(str(i), "", "", facts={"tools": [AREA], "truth": TRUTH}) for i in range(4)]
    good = json.dumps({"name": "area", "arguments": {"base": 1, "height": 2}})
    bad = json.dumps({"name": "area", "arguments": {"base": "1", "height": 2}})
    found = measures(items, [good, good, "none", good], [good, bad, good, "none"])
    assert found["schema_accuracy_reference"] == 1.0
    assert found["schema_accuracy_candidate"] == pytest.approx(2 / 3)
    assert found["trigger_f1"] == pytest.approx(2 * 2 / (3 + 3))
    assert measures(items, ["none"] * 4, ["none"] * 4)["trigger_f1"] is None
