"""A JSON object from outside, read field by field with the type that each must have.

Invariant: what comes out has the type that the method names; anything else is a `BadRequest` that names the field. An
absent field and a null one mean the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.engine.embedded.refusals import BadRequest, shown


class Fields:
    def __init__(self, body: object) -> None:
        if not isinstance(body, Mapping):
            raise BadRequest("the body must be a JSON object")
        self.body: Mapping[str, Any] = body

    def __contains__(self, name: str) -> bool:
        return self.body.get(name) is not None

    def string(self, name: str, default: str | None = None) -> str:
        value = self.optional_string(name)
        if value is None:
            if default is None:
                raise BadRequest(f"{name} is missing: give a string", name)
            return default
        return value

    def optional_string(self, name: str) -> str | None:
        value = self.body.get(name)
        if value is not None and not isinstance(value, str):
            raise BadRequest(f"{name} must be a string, not {shown(value)}", name)
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self.body.get(name)
        if value is not None and not isinstance(value, bool):
            raise BadRequest(f"{name} must be true or false, not {shown(value)}", name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None, *, low: int, high: int) -> int:
        value = self.body.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadRequest(f"{name} must be an integer, not {shown(value)}", name)
        if not low <= value <= high:
            raise BadRequest(f"{name} must lie between {low} and {high}, not {shown(value)}", name)
        return value

    def strings(self, name: str) -> list[str]:
        value = self.body.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise BadRequest(f"{name} must be a list of strings, not {shown(value)}", name)
        return value

    def one_of(self, name: str, known: tuple[str, ...], default: str) -> str:
        value = self.string(name, default)
        if value not in known:
            raise BadRequest(f"{name} must be one of {', '.join(known)}, not {shown(value)}", name)
        return value
