"""One declaration per flag: default, help, allowed values and range check live in the dataclass field itself.

The annotation of a field is the type it has *after* `resolve`; a derived field may hold None before that.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
import logging
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from slime.errors import UserError

Check = Callable[[Any], "str | None"]
"""Returns what the value must be ("must be at least 1") when it is not, else None."""

METADATA_KEY = "flag"


@dataclasses.dataclass(frozen=True)
class Flag:
    """What is known about a flag beyond its name, type and default."""

    help: str
    choices: tuple[str, ...] = ()
    later: tuple[str, ...] = ()
    """Values that exist in slime but not in this version: refused with a sentence of their own."""
    metavar: str | None = None
    check: Check | None = None
    aliases: tuple[str, ...] = ()
    repeat: bool = False
    """Given several times, the values add up instead of the last one winning."""
    derived: str | None = None
    """How the value comes about when it is not given."""
    required: bool = False
    secret: bool = False
    """Kept by the process that was told: in no dict, file, log or message to another process."""
    no_effect: str | None = None
    """Why another value than the default changes nothing here: a run that is given one says so."""


def flag(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    later: tuple[str, ...] = (),
    metavar: str | None = None,
    check: Check | None = None,
    aliases: tuple[str, ...] = (),
    repeat: bool = False,
    derived: str | None = None,
    required: bool = False,
    secret: bool = False,
    no_effect: str | None = None,
) -> Any:
    """Declare one configuration field that is also one command-line flag."""
    info = Flag(help, choices, later, metavar, check, aliases, repeat, derived, required, secret, no_effect)
    metadata = {METADATA_KEY: info}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    if secret:  # two configs that differ in nothing else are the same run
        return dataclasses.field(default=default, metadata=metadata, repr=False, compare=False)
    return dataclasses.field(default=default, metadata=metadata)


def at_least(minimum: float) -> Check:
    """The value is `minimum` or more."""
    return lambda value: None if value >= minimum else f"must be at least {minimum}"


def above(minimum: float) -> Check:
    """The value is strictly greater than `minimum`."""
    return lambda value: None if value > minimum else f"must be greater than {minimum}"


def between(low: float, high: float, *, low_open: bool = False, high_open: bool = False) -> Check:
    """The value lies in the interval from `low` to `high`, each end open or closed."""

    def check(value: float) -> str | None:
        above_low = value > low if low_open else value >= low
        below_high = value < high if high_open else value <= high
        interval = f"{'(' if low_open else '['}{low}, {high}{')' if high_open else ']'}"
        return None if above_low and below_high else f"must lie in {interval}"

    return check


def minus_one_or_at_least(minimum: float) -> Check:
    """The value is -1 (meaning "off" or "automatic") or `minimum` and more."""
    return lambda value: None if value == -1 or value >= minimum else f"must be -1 or at least {minimum}"


# What a field's annotation says about its flag: the kind of value it takes and whether it may be None.


@dataclasses.dataclass(frozen=True)
class FlagSpec:
    """One flag, described completely: this is what parser, help, files and checks are made from."""

    name: str
    kind: str
    """bool, int, float, str, strs, ints, dict or pairs."""
    optional: bool
    default: Any
    info: Flag
    group: str

    @property
    def flag(self) -> str:
        """How it is written on the command line."""
        return flag_name(self.name)

    @property
    def metavar(self) -> str:
        """What stands for the value in help texts; empty for switches."""
        if self.kind == "bool":
            return ""
        if self.info.choices:
            return "|".join(choice for choice in self.info.choices)
        placeholder = self.info.metavar or _METAVARS.get(self.kind, "VALUE")
        return f"{placeholder} [...]" if self.kind in ("strs", "ints", "pairs") else placeholder


_METAVARS = {"int": "N", "float": "X", "dict": "JSON"}
_KINDS: dict[Any, str] = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    list[str]: "strs",
    list[int]: "ints",
    dict[str, Any]: "dict",
    list[tuple[str, str]]: "pairs",
}


def flag_name(field_name: str) -> str:
    """rollout_batch_size -> --rollout-batch-size"""
    return "--" + field_name.replace("_", "-")


def specs_of_group(group: type) -> list[FlagSpec]:
    """The flags one group class declares, in the order of its source."""
    annotations = typing.get_type_hints(group)
    title = (group.__doc__ or group.__name__).strip()
    return [_spec(field, annotations[field.name], title) for field in dataclasses.fields(group)]


def _spec(field: dataclasses.Field[Any], annotation: Any, title: str) -> FlagSpec:
    info: Flag = field.metadata[METADATA_KEY]
    optional = False
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        members = [member for member in typing.get_args(annotation) if member is not type(None)]
        annotation, optional = members[0], True
    factory = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()
    return FlagSpec(field.name, _KINDS[annotation], optional, default, info, title)


# The nearest known name for a mistyped one, and one message for all that are not known.


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name most like `name`, or None when nothing is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """The end of an error sentence: `: did you mean X?`, or nothing."""
    match = nearest(name, known)
    return f": did you mean {prefix}{match}?" if match else ""


def one_message(sentences: Sequence[str], what: str) -> str:
    """All unknown names of one place at once: a sentence, or a line for each; `what` they are, in the plural."""
    distinct = list(dict.fromkeys(sentences))
    if len(distinct) == 1:
        return distinct[0]
    return "\n".join([f"{len(distinct)} {what} are not known here:", *(f"  {sentence}" for sentence in distinct)])


# Turning what the user wrote into a value of the field's type, or one sentence that says why not.
#
# Invariant: a value that leaves `parse_text` or `coerce` has exactly the type of its field, so files, command line and
# Python calls give equal configs for equal input.

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
