"""Files that list datasets, each with values of its own: what `--eval-config` and `--prompt-config` have in common.

Invariant: what comes out has a name, a path and only known keys, each of the right kind and in range; anything else is
a `UserError` that says where. A file looks like this, with `eval` or `train` as the section (a mapping from names to
datasets will do for the list; TOML and JSON likewise); one file may have both sections:

    eval:
      defaults: {rm_type: math}
      datasets:
        - {name: aime, path: aime.jsonl, max_response_len: 4096}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.config.files import read_config_file
from slime.config.flag import Check, at_least
from slime.config.groups.reward import known_rm_type
from slime.config.suggest import did_you_mean
from slime.errors import UserError

_SECTIONS = ("eval", "train")


@dataclass(frozen=True)
class Entry:
    """What a value in the file must be."""

    kind: str
    fits: Callable[[Any], bool]
    check: Check | None = None


@dataclass(frozen=True)
class Listed:
    """One dataset of a file: its own values over the file's defaults."""

    name: str
    path: str
    origin: str
    """Where it was named, for error messages."""
    values: dict[str, Any]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(fits(item) for item in value)


def text(check: Check | None = None) -> Entry:
    """A text, perhaps one of some."""
    return Entry("text", _is_text, check)


def integer(check: Check) -> Entry:
    """A whole number in a range."""
    return Entry("an integer", _is_integer, check)


def number(check: Check) -> Entry:
    """A number in a range."""
    return Entry("a number", _is_number, check)


SWITCH = Entry("true or false", lambda value: isinstance(value, bool))
MAPPING = Entry("a mapping", lambda value: isinstance(value, dict))

READING: dict[str, Entry] = {
    "rm_type": text(known_rm_type),
    "custom_rm_path": text(),
    "custom_generate_function_path": text(),
    "input_key": text(),
    "label_key": text(),
    "metadata_key": text(),
    "tool_key": text(),
    "prompt_suffix": text(),
    "apply_chat_template": SWITCH,
    "apply_chat_template_kwargs": MAPPING,
    "max_prompt_len": integer(at_least(1)),
    "max_response_len": integer(at_least(1)),
    "min_new_tokens": integer(at_least(0)),
    "stop": Entry("a list of texts", _list_of(_is_text)),
    "stop_token_ids": Entry("a list of integers", _list_of(_is_integer)),
    "metadata_overrides": MAPPING,
}
"""How prompts are read and judged, and where answers end: keys of every such file."""


def read_datasets(
    path: str, *, flag: str, section: str, known: Mapping[str, Entry], elsewhere: Mapping[str, str] | None = None
) -> list[Listed]:
    """The datasets of a section; `elsewhere` says of keys that are not `known` what to use instead."""
    where = f"{flag} {path}"
    content = read_config_file(path, what=flag)
    content = _mapping(content.get(section, content), f"{where}: {section}")
    if other := next((name for name in _SECTIONS if name != section and name in content), None):
        raise UserError(f"{where} has no section {section}, only {other}: list its datasets under {section}: datasets")
    _refuse_unknown(content, ("defaults", "datasets"), where)
    check = _Checked(known, elsewhere or {})
    defaults = check(_mapping(content.get("defaults") or {}, f"{where}: defaults"), f"{where}: defaults")
    datasets = list(_named(content.get("datasets"), where))
    if not datasets:
        raise UserError(f"{where} has no datasets: list them under {section}: datasets, each with a name and a path")
    found = []
    for name, entries in datasets:
        origin = f"{where}, dataset {name}"
        own = check({key: value for key, value in entries.items() if key != "path"}, origin)
        file = entries.get("path")
        if not isinstance(file, str):
            raise UserError(f"{origin}: path is missing: name a .jsonl or .parquet file")
        shared = {key: value for key, value in defaults.items() if key != "custom_rm_path" or "rm_type" not in own}
        found.append(Listed(name, file, origin, {**shared, **own}))
    return found


def refuse_twins(names: Sequence[str], where: str) -> None:
    """Each dataset has its own name."""
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{where} has two datasets named {name}: give each its own name")


def _named(datasets: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and entries of each dataset, from either form."""
    if isinstance(datasets, dict):
        for name, entries in datasets.items():
            yield str(name), {"path": entries} if _is_text(entries) else _mapping(entries, f"{where}: {name}")
        return
    if not isinstance(datasets, list | None):
        raise UserError(f"{where}: datasets must be a list or a mapping, not {datasets!r:.80}")
    for place, one in enumerate(datasets or [], start=1):
        entries = _mapping(one, f"{where}: dataset {place}")
        name = entries.get("name")
        if not _is_text(name) or not name:
            raise UserError(f"{where}: dataset {place} has no name")
        yield name, {key: value for key, value in entries.items() if key != "name"}


@dataclass(frozen=True)
class _Checked:
    """The entries that have a value, each of the right kind and in range."""

    known: Mapping[str, Entry]
    elsewhere: Mapping[str, str]

    def __call__(self, entries: dict[str, Any], where: str) -> dict[str, Any]:
        for key in entries:
            if key in self.elsewhere:
                raise UserError(f"{where}: {key} {self.elsewhere[key]}")
        _refuse_unknown(entries, (*self.known, "path", "name"), where)
        given = {key: value for key, value in entries.items() if value is not None}
        for key, value in given.items():
            if key not in self.known:
                raise UserError(f"{where}: {key} belongs to a dataset of its own")
            entry = self.known[key]
            if not entry.fits(value):
                raise UserError(f"{where}: {key} must be {entry.kind}, not {value!r:.80}")
            complaint = entry.check(value) if entry.check else None
            if complaint:
                raise UserError(f"{where}: {key} {complaint}, not {value}")
        return given


def _refuse_unknown(entries: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in entries:
        if key not in known:
            raise UserError(f"{where}: unknown key {key}{did_you_mean(str(key), known)}")


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where} must be a mapping, not {value!r:.80}")
    return value
