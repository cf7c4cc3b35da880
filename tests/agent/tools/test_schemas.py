"""Tool schemas from signatures and docstrings, and errors for arguments that do not fit."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

import pytest

from slime.agent.tools import FunctionTool
from slime.agent.tools.schemas import find_mismatch, read_docstring
from slime.errors import UserError


class Unit(StrEnum):
    METRE = "m"
    FOOT = "ft"


def weather(
    city: str,
    days: int = 3,
    unit: Literal["c", "f"] = "c",
    at: list[float] | None = None,
    note: Annotated[str, "anything else"] = "",
) -> str:
    """The weather of a city.

    In words.

    Args:
        city: its name,
            as on maps
        days (int): how many
            days ahead
    Returns:
        words
    """
    return f"{city} {days} {unit} {at} {note}"


def test_schema_is_built_from_signature_and_docstring() -> None:
    assert FunctionTool(weather).schema == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.\n\nIn words.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "its name, as on maps"},
                    "days": {"type": "integer", "description": "how many days ahead", "default": 3},
                    "unit": {"enum": ["c", "f"], "default": "c"},
                    "at": {
                        "anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "null"}],
                        "default": None,
                    },
                    "note": {"type": "string", "description": "anything else", "default": ""},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }


def test_schema_covers_enums_mappings_and_untyped_parameters() -> None:
    def measure(unit: Unit, sizes: dict[str, int], anything, *, sample: Any) -> None: ...

    parameters = FunctionTool(measure, name="ruler", description="measures").schema["function"]["parameters"]
    assert parameters["properties"] == {
        "unit": {"enum": ["m", "ft"]},
        "sizes": {"type": "object", "additionalProperties": {"type": "integer"}},
        "anything": {},
    }
    assert parameters["required"] == ["unit", "sizes", "anything"]


def test_reads_sphinx_style_docstrings() -> None:
    text = "Adds.\n\n:param a: the first\n:param int b: the second,\n    a number\n:returns: their sum"
    assert read_docstring(text) == ("Adds.", {"a": "the first", "b": "the second, a number"})


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"city": "Rom"}, None),
        ({"city": "Rom", "days": 2, "at": [1, 2.5], "unit": "f"}, None),
        ({}, "arguments lack 'city'"),
        ({"city": 3}, "city must be a string, not 3"),
        ({"city": "Rom", "days": "2"}, "days must be an integer, not '2'"),
        ({"city": "Rom", "days": True}, "days must be an integer, not True"),
        ({"city": "Rom", "unit": "k"}, "unit must be one of 'c', 'f', not 'k'"),
        ({"city": "Rom", "at": ["x"]}, "at must be an array or null, not ['x']"),
        ({"city": "Rom", "when": 1}, "there is no parameter 'when'; there are: city, days, unit, at, note"),
    ],
)
def test_misfit_names_the_wrong_argument(arguments: dict[str, Any], reason: str | None) -> None:
    assert find_mismatch(arguments, FunctionTool(weather).schema["function"]["parameters"]) == reason


def test_misfit_gives_the_path_of_nested_values() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}
    assert find_mismatch({"a": [1, "2"]}, schema) == "a[1] must be an integer, not '2'"
    nested = {"properties": {"a": {"type": "object", "required": ["b"], "properties": {"b": {"type": "null"}}}}}
    assert find_mismatch({"a": {}}, nested) == "a lacks 'b'"
    assert find_mismatch({"a": {"b": 1}}, nested) == "a.b must be null, not 1"
    assert find_mismatch({"x": 1}, {"additionalProperties": {"type": "string"}}) == "x must be a string, not 1"


def test_rejects_functions_that_cannot_be_tools() -> None:
    def starred(*values: int) -> None: ...

    def strange(value: Unit | complex) -> None: ...

    with pytest.raises(UserError, match="tool starred: parameter values cannot be given by name"):
        FunctionTool(starred)
    with pytest.raises(UserError, match="tool strange: parameter value has the type <class 'complex'>"):
        FunctionTool(strange)
    with pytest.raises(UserError, match="a tool needs a name"):
        FunctionTool(lambda a: a)
    with pytest.raises(UserError, match="a tool is a function, not 3"):
        FunctionTool(3)  # type: ignore[arg-type]
