"""One declaration per flag: default, help, allowed values and range check live in the dataclass field itself.

The annotation of a field is the type it has *after* `resolve`; a derived field may hold None before that.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

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
