"""Declaration of flags: default, help, allowed values and range check are in the dataclass field itself.

The annotation of a field is the type it has *after* `resolve`; a derived field may hold None before that. `FlagSpec`
describes one flag.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

from slime.storage.json_types import JsonObject

Check = Callable[[Any], "str | None"]
"""Returns what the value must be ("must be at least 1") when it is not, else None."""

METADATA_KEY = "flag"


@dataclasses.dataclass(frozen=True)
class Flag:
    """Properties of a flag in addition to its name, type and default."""

    help: str
    choices: tuple[str, ...] = ()
    later: tuple[str, ...] = ()
    """Values that exist in upstream slime but not in this version; their error message says so."""
    metavar: str | None = None
    check: Check | None = None
    aliases: tuple[str, ...] = ()
    repeat: bool = False
    """If the flag is given several times, the values are concatenated instead of the last one being used."""
    derived: str | None = None
    """The value that is derived if the flag is not given, for help texts."""
    follows: str | None = None
    """The flag whose value this one gets if it is not given (`resolve.derive`); it is also the text of `derived`."""
    required: bool = False
    secret: bool = False
    """Left out of dicts, files, logs and messages to other processes."""
    no_effect: str | None = None
    """The reason why the flag has no effect here; a run prints it if the value is not the default."""


def flag(default: object, help: str, **properties: Any) -> Any:
    """Declare one configuration field that is also one command-line flag, with the properties of a `Flag`."""
    metadata = {METADATA_KEY: Flag(help, **{"derived": properties.get("follows"), **properties})}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    # secrets are not compared: configs that differ only in secrets are the same run
    shown = not properties.get("secret", False)
    return dataclasses.field(default=default, metadata=metadata, repr=shown, compare=shown)


def at_least(minimum: float) -> Check:
    """Check that the value is `minimum` or more."""
    return lambda value: None if value >= minimum else f"must be at least {minimum}"


def above(minimum: float) -> Check:
    """Check that the value is strictly greater than `minimum`."""
    return lambda value: None if value > minimum else f"must be greater than {minimum}"


def between(low: float, high: float, *, low_open: bool = False, high_open: bool = False) -> Check:
    """Check that the value is in the interval from `low` to `high`, each end open or closed."""

    def check(value: float) -> str | None:
        above_low = value > low if low_open else value >= low
        below_high = value < high if high_open else value <= high
        interval = f"{'(' if low_open else '['}{low}, {high}{')' if high_open else ']'}"
        return None if above_low and below_high else f"must be in {interval}"

    return check


def minus_one_or_at_least(minimum: float) -> Check:
    """Check that the value is -1 (meaning "off" or "automatic"), or `minimum` or more."""
    return lambda value: None if value == -1 or value >= minimum else f"must be -1 or at least {minimum}"


@dataclasses.dataclass(frozen=True)
class FlagSpec:
    """The complete description of one flag, which parser, help, files and checks use."""

    name: str
    kind: str
    """bool, int, float, str, strs, ints, dict or pairs."""
    optional: bool
    default: object
    info: Flag
    group: str

    @property
    def flag(self) -> str:
        """The flag as written on the command line."""
        return flag_name(self.name)

    @property
    def metavar(self) -> str:
        """The placeholder for the value in help texts; empty for switches."""
        if self.kind == "bool":
            return ""
        if self.info.choices:
            return "|".join(choice for choice in self.info.choices)
        placeholder = self.info.metavar or _METAVARS.get(self.kind, "VALUE")
        return f"{placeholder} [...]" if self.kind in ("strs", "ints", "pairs") else placeholder


_METAVARS = {"int": "N", "float": "X", "dict": "JSON"}
_KINDS: dict[object, str] = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    list[str]: "strs",
    list[int]: "ints",
    JsonObject: "dict",
    list[tuple[str, str]]: "pairs",
}


def flag_name(field_name: str) -> str:
    """Convert a field name to its flag: rollout_batch_size -> --rollout-batch-size."""
    return "--" + field_name.replace("_", "-")


def specs_of_group(group: type) -> list[FlagSpec]:
    """Return the specs of the flags that a group class declares, in the order of its source."""
    annotations = typing.get_type_hints(group)
    title = (group.__doc__ or group.__name__).strip()
    specs: list[FlagSpec] = []
    for field in dataclasses.fields(group):
        info: Flag = field.metadata[METADATA_KEY]
        annotation, optional = annotations[field.name], False
        if typing.get_origin(annotation) in (types.UnionType, typing.Union):
            members = [member for member in typing.get_args(annotation) if member is not type(None)]
            annotation, optional = members[0], True
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        specs.append(FlagSpec(field.name, _KINDS[annotation], optional, default, info, title))
    return specs


def nearest_name(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name most similar to `name`, or None if no name is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """Return the end of an error sentence, `: did you mean X?`, or an empty string."""
    match = nearest_name(name, known)
    return f": did you mean {prefix}{match}?" if match else ""
