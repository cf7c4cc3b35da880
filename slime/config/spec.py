"""What a field's annotation says about its flag: the kind of value it takes and whether it may be None."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from slime.config.flag import METADATA_KEY, Flag


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
