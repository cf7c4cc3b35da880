"""Turning what the user wrote into a value of the field's type, or one sentence that says why not.

Invariant: a value that leaves `parse_text` or `coerce` has exactly the type of its field, so files, command line and
Python calls give equal configs for equal input.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from slime.config.spec import FlagSpec
from slime.config.suggest import did_you_mean
from slime.errors import UserError

ONLY_DATASET = "aime"
"""The name of a dataset that was given by its path alone."""

_log = logging.getLogger(__name__)
_WANTED = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "strs": "a list of texts",
    "ints": "a list of whole numbers",
    "dict": 'a JSON object like {"key": 1}',
    "pairs": "pairs of a name and a path",
}


def parse_text(spec: FlagSpec, texts: Sequence[str], where: str) -> Any:
    """The value of a flag from the words that follow it on the command line."""
    if not texts:
        raise UserError(f"{where} needs a value ({spec.metavar})")
    if spec.kind in ("strs", "ints"):
        return coerce(spec, list(texts), where)
    if spec.kind == "pairs":
        if len(texts) == 1 and not texts[0].startswith("-"):
            _log.warning("%s %s has no name: it is called %s, as upstream does", where, texts[0], ONLY_DATASET)
            texts = [ONLY_DATASET, *texts]
        if len(texts) % 2:
            raise UserError(f"{where} takes pairs NAME PATH, but got {len(texts)} values: {' '.join(texts)}")
        return coerce(spec, [[texts[i], texts[i + 1]] for i in range(0, len(texts), 2)], where)
    return coerce(spec, texts[0], where)


def coerce(spec: FlagSpec, value: Any, where: str) -> Any:
    """`value` as the field's type; text is read the way the command line reads it."""
    if spec.kind == "str":
        return _choice(spec, _text(spec, value, where), where)
    if spec.kind == "bool":
        return _boolean(spec, value, where)
    if spec.kind in ("int", "float"):
        return _number(spec, value, where, spec.kind)
    if spec.kind in ("strs", "ints"):
        return _list(spec, value, where)
    if spec.kind == "pairs":
        return _pairs(spec, value, where)
    return _object(spec, value, where)


def guess(text: str) -> Any:
    """The likeliest type of a carried-through value: whole number, number, true/false, or the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def plain_value(value: Any, where: str) -> Any:
    """`value` made of JSON types only, so that configs can be saved and sent between processes."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_value(item, where) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain_value(item, where) for key, item in value.items()}
    if hasattr(value, "__fspath__") or hasattr(value, "isoformat"):
        return str(value)
    raise UserError(f"{where} has a value of type {type(value).__name__}, which a config cannot hold: use plain values")


def _refuse(spec: FlagSpec, value: Any, where: str) -> NoReturn:
    raise UserError(f"{where} must be {_WANTED[spec.kind]}, not {value!r}")


def _text(spec: FlagSpec, value: Any, where: str) -> str:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value if isinstance(value, str) else _refuse(spec, value, where)


def _choice(spec: FlagSpec, value: str, where: str) -> str:
    info = spec.info
    if not info.choices or value in info.choices:
        return value
    if value in info.later:
        raise UserError(
            f"{where} {value} exists in slime, but this version does not have it yet: use {' or '.join(info.choices)}"
        )
    hint = did_you_mean(value, info.choices)
    raise UserError(f"{where} must be one of {', '.join(info.choices)}, not {value!r}{hint}")


def _boolean(spec: FlagSpec, value: Any, where: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    _refuse(spec, value, where)


def _number(spec: FlagSpec, value: Any, where: str, kind: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        _refuse(spec, value, where)
    try:
        if kind == "float":
            number = float(value)
            return number if number == number else _refuse(spec, value, where)
        if isinstance(value, float):
            return int(value) if value.is_integer() else _refuse(spec, value, where)
        return int(value)
    except ValueError:
        _refuse(spec, value, where)


def _list(spec: FlagSpec, value: Any, where: str) -> list[Any]:
    items = [value] if isinstance(value, str | int) and not isinstance(value, bool) else value
    if not isinstance(items, list | tuple):
        _refuse(spec, value, where)
    if spec.kind == "ints":
        return [_number(spec, item, where, "int") for item in items]
    return [_text(spec, item, where) for item in items]


def _pairs(spec: FlagSpec, value: Any, where: str) -> list[tuple[str, str]]:
    items = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(items, list | tuple):
        _refuse(spec, value, where)
    if items and all(isinstance(item, str) for item in items):
        items = list(zip(items[::2], items[1::2], strict=True)) if len(items) % 2 == 0 else _refuse(spec, value, where)
    pairs: list[tuple[str, str]] = []
    for item in items:
        if not isinstance(item, list | tuple) or len(item) != 2:
            _refuse(spec, value, where)
        pairs.append((_text(spec, item[0], where), _text(spec, item[1], where)))
    return pairs


def _object(spec: FlagSpec, value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise UserError(f"{where} must be {_WANTED['dict']}, but {value!r} is not JSON: {error}") from error
    if not isinstance(value, Mapping):
        _refuse(spec, value, where)
    return dict(plain_value(value, where))
