"""OpenAI's API as far as the embedded engine and the agent server share it: request fields, tool choice, calls, usage.

Invariant: a method of `Field` returns a value of its type or raises the error of its server, which names the field by
its path in the body. An absent field and a null one mean the same.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import Self

from slime.storage.json_types import JsonMapping, JsonObject


class Field(ABC):
    """A JSON value of a request body, of any type, with its path. Each server has a subclass with its own errors."""

    __slots__ = ("_key", "_parent", "value")

    def __init__(self, value: object, key: str | int = "the body", parent: Self | None = None) -> None:
        self.value, self._key, self._parent = value, key, parent

    @property
    def path(self) -> str:
        """The place of the value in the body, such as `messages[0].content`; made for errors only."""
        if self._parent is None:
            return str(self._key)
        inside = "" if self._parent.is_body else self._parent.path
        if isinstance(self._key, int):
            return f"{inside}[{self._key}]"
        return f"{inside}.{self._key}" if inside else self._key

    @property
    def is_body(self) -> bool:
        return self._parent is None and self._key == "the body"

    @abstractmethod
    def bad(self, why: str) -> Exception:
        """Make the error for an invalid value; `why` follows the path of the field."""

    @staticmethod
    @abstractmethod
    def described(value: object) -> str:
        """Describe an invalid value for an error message."""

    def text_of(self, value: str) -> str:
        """Return a string of the body in the form in which it is used."""
        return value

    def must_be(self, expected: str) -> Exception:
        """Make the error for a value of another type than expected."""
        return self.bad(f"must be {expected}, not {self.described(self.value)}")

    def __getitem__(self, name: str) -> Self:
        return self.__class__(self.object().get(name), name, self)

    def __contains__(self, name: str) -> bool:
        return self.object().get(name) is not None

    def object(self, *, optional: bool = False) -> JsonMapping:
        """Return an object; with `optional` an empty value of any type is an empty object."""
        if optional and not self.value:
            return {}
        if not isinstance(self.value, dict):
            raise self.must_be("an object")
        return self.value

    def items(self, *, optional: bool = False) -> list[Self]:
        """Return the entries of a list; with `optional` an empty value of any type is an empty list."""
        if optional and not self.value:
            return []
        if not isinstance(self.value, list):
            raise self.must_be("a list")
        return [self.__class__(value, i, self) for i, value in enumerate(self.value)]

    def text(self, default: str | None = None) -> str:
        if self.value is None and default is not None:
            return default
        if not isinstance(self.value, str):
            raise self.must_be("a string")
        return self.text_of(self.value)

    def optional_text(self) -> str | None:
        return None if self.value is None else self.text()

    def name(self) -> str:
        """Return a string that is not blank."""
        if not (name := self.text()).strip():
            raise self.bad("must not be empty")
        return name

    def texts(self) -> list[str]:
        """Return the strings of a list."""
        return [entry.text() for entry in self.items()]

    def one_of(self, known: Collection[str], default: str) -> str:
        if (value := self.text(default)) not in known:
            raise self.must_be(f"one of {', '.join(known)}")
        return value

    def flag(self, default: bool = False) -> bool:
        if self.value is None:
            return default
        if not isinstance(self.value, bool):
            raise self.must_be("true or false")
        return self.value

    def number(self) -> float | None:
        if self.value is None:
            return None
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise self.must_be("a number")
        try:
            number = float(self.value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.bad("must be a finite number")
        return number

    def whole(self, least: int) -> int | None:
        """Return an integer of 64 bits, also one that is written as a float such as 5.0."""
        if self.number() is None:
            return None
        assert isinstance(self.value, int | float)
        if self.value != int(self.value) or not least <= self.value < 2**63:
            raise self.bad(f"must be a whole number of at least {least}")
        return int(self.value)

    def integer(self, default: int | None = None, *, low: int, high: int) -> int:
        """Return an integer in a range; one that is written as a float is refused."""
        if self.value is None and default is not None:
            return default
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            raise self.must_be("an integer")
        if not low <= self.value <= high:
            raise self.must_be(f"between {low} and {high}")
        return self.value

    def tool_choice(self, names: Collection[str], *kinds: str, nested: bool = False) -> str:
        """Return "auto", "none", "required" or the name of one of the tools `names`.

        An object of one of these `kinds` names a tool, in a `function` if it is `nested`.
        """
        if self.value is None:
            return "auto"
        if isinstance(self.value, str):
            if self.value not in ("auto", "none", "required"):
                raise self.bad('must be "auto", "none", "required" or a function')
            return self.value
        if self.object().get("type") not in kinds:
            raise self["type"].bad("must be " + " or ".join(f'"{kind}"' for kind in kinds))
        return self.tool_name(self["function"]["name"] if nested else self["name"], names)

    def tool_name(self, given: Self, names: Collection[str]) -> str:
        """Return the name of a tool, which must be among `names`."""
        name = given.name()
        if name not in names:
            raise self.bad(f"there is no tool {name!r} in this request")
        return name


def function_names(tools: Iterable[JsonMapping]) -> set[str]:
    """The names of tools in OpenAI's form."""
    return {tool["function"]["name"] for tool in tools}


def call_json(id_: str, name: str, arguments: str) -> JsonObject:
    """A tool call of a message, or the beginning of one in a stream."""
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def usage_json(prompt: int, cached: int, completion: int, reasoning: int | None = None) -> JsonObject:
    """Token counts of a chat or a completion; `reasoning` tokens only where they are counted."""
    usage: JsonObject = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return usage if reasoning is None else usage | {"completion_tokens_details": {"reasoning_tokens": reasoning}}


def error_json(message: str, kind: str, param: str | None, code: str | int) -> JsonObject:
    """The body of an error response, or an error in a stream."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
