"""From words on the command line to a Config.

Invariant: every word is accounted for. A flag is a field, a carried-through one (sglang-*, router-*, Megatron's, the
user's own), a known one this version lacks, or an error that suggests the nearest name. Precedence, lowest first:
defaults, --config files in order, the command line, --custom-config-path files in order, which also hold the user's own
entries.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from slime.config.config import FLAG_SPECS, Config, read_config_file
from slime.config.fields import FlagSpec, coerce, did_you_mean, guess, nearest, one_message, parse_text, plain_value
from slime.config.flag_aliases import REFUSED, foreign_hint, foreign_setting, refusal
from slime.config.help import FILE_FLAGS, format_help
from slime.config.megatron_flags import (
    FIELD_FLAGS,
    FLOAT,
    INT,
    MEGATRON_CLASSES,
    MEGATRON_FLAGS,
    NUMBER,
    OTHERS,
    SWITCH,
    TEXTS,
)
from slime.config.resolve import resolve
from slime.errors import UserError

AddCustomArguments = Callable[[argparse.ArgumentParser], "argparse.ArgumentParser | None"]

_FLAG = re.compile(r"--[A-Za-z]")
_CARRIED_PREFIXES = ("sglang-", "router-")
FOR_PLUGINS = ("max-turns",)
"""Flags that only plugins read: a driver of the user's may declare them as its own."""
_FILE_FLAGS = tuple(name[2:] for name, metavar, _ in FILE_FLAGS if metavar)


@dataclasses.dataclass(frozen=True)
class Occurrence:
    """One flag as it was written, with the words that belong to it."""

    name: str
    """Without the dashes in front, words joined by dashes; a setting as other libraries have it, as it is written."""
    words: tuple[str, ...]

    @property
    def shown(self) -> str:
        return f"--{self.name}"


def parse_args(argv: Sequence[str] | None = None, add_custom_arguments: AddCustomArguments | None = None) -> Config:
    """The resolved and checked config of a command line (default: sys.argv[1:])."""
    return resolve(parse_flags(argv, add_custom_arguments))


def parse_flags(argv: Sequence[str] | None = None, add_custom_arguments: AddCustomArguments | None = None) -> Config:
    """The config as written, before anything is derived or checked."""
    occurrences = scan(sys.argv[1:] if argv is None else argv)
    custom = _custom_parser(add_custom_arguments)
    if any(occurrence.name == "help" for occurrence in occurrences):
        print(format_help(), end="")
        if custom is not None:
            print(f"\nFlags of this driver\n{custom.format_help()}", end="")
        raise SystemExit(0)
    values: dict[str, Any] = {}
    carried: dict[str, Any] = {}
    for occurrence in occurrences:
        if occurrence.name == "config":
            _take_file(_single_word(occurrence), values, carried, what="--config", custom=custom)
    _take_command_line(occurrences, custom, values, carried)
    for occurrence in occurrences:
        if occurrence.name == "custom-config-path":
            _take_custom_file(_single_word(occurrence), values, carried)
    return Config(**values, carried=carried)


def config_of_settings(settings: Mapping[str, Any], origin: str, argv: Sequence[str] = ()) -> Config:
    """The config as written, of `settings` in the place of a --config file `origin`, and a command line."""
    values: dict[str, Any] = {}
    carried: dict[str, Any] = {}
    _take_settings(settings, origin, values, carried)
    occurrences = scan(argv)
    for occurrence in occurrences:
        if occurrence.name in (*_FILE_FLAGS, "help"):
            raise UserError(f"{occurrence.shown} does not go with {origin}: write what it says into that file")
    _take_command_line(occurrences, None, values, carried)
    return Config(**values, carried=carried)


def config_of_keywords(keywords: Mapping[str, Any]) -> Config:
    """The config that these keywords mean, as `parse_flags` has it of a command line."""
    given = dict(keywords)
    files, custom_file = given.pop("config", None) or (), given.pop("custom_config_path", None)
    values: dict[str, Any] = {}
    carried: dict[str, Any] = {}
    for file in [files] if isinstance(files, str | os.PathLike) else files:
        _take_file(os.fspath(file), values, carried, what="config")
    carried |= given.pop("carried", None) or {}
    named: dict[str, Any] = {}
    for name, value in given.items():
        flag = name.replace("_", "-")
        if flag in _BY_FLAG:
            named[_BY_FLAG[flag].name] = value
        elif _is_carried(flag):
            carried[name] = plain_value(value, name)
        else:
            named[name] = value
    config = Config.from_dict({**values, **named, "carried": carried})
    if custom_file is None:
        return config
    over: dict[str, Any] = {}
    _take_custom_file(os.fspath(custom_file), over, carried)
    return config.replace(**over, carried=carried)


def scan(argv: Sequence[str]) -> list[Occurrence]:
    """Cut a command line into flags and their words; `--flag=value` and `--flag value` mean the same."""
    occurrences: list[Occurrence] = []
    for word in argv:
        if word in ("-h", "--help"):
            occurrences.append(Occurrence("help", ()))
        elif foreign_setting(word) is not None:
            occurrences.append(Occurrence(word, ()))
        elif _FLAG.match(word):
            name, equals, value = word[2:].partition("=")
            occurrences.append(Occurrence(name.replace("_", "-"), (value,) if equals else ()))
        elif not occurrences:
            raise UserError(f"unexpected argument {word!r}: flags start with two dashes")
        else:
            last = occurrences.pop()
            occurrences.append(Occurrence(last.name, (*last.words, word)))
    return occurrences


def _take_command_line(
    occurrences: Iterable[Occurrence],
    custom: _CustomParser | None,
    values: dict[str, Any],
    carried: dict[str, Any],
) -> None:
    repeated: dict[str, list[Any]] = {}
    custom_words: list[str] = []
    unknown: list[str] = []
    for occurrence in occurrences:
        spec, negated = _field(occurrence.name)
        if custom is not None and custom.owns(occurrence.name):
            custom_words += [custom.spelling(occurrence.name), *occurrence.words]
        elif spec is not None:
            value = _field_value(spec, occurrence, negated)
            if spec.info.repeat:
                repeated.setdefault(spec.name, []).extend(value)
                value = repeated[spec.name]
            values[spec.name] = value
        elif _turns_field_off(occurrence.name):
            carried[occurrence.name[3:].replace("-", "_")] = not _megatron_value(occurrence, SWITCH)
        elif _is_carried(occurrence.name):
            carried[occurrence.name.replace("-", "_")] = _carried_value(occurrence)
        elif occurrence.name not in _FILE_FLAGS:
            own_flags = custom.names if custom is not None else ()
            known_elsewhere = foreign_setting(occurrence.name) or refusal(occurrence.name)
            unknown.append(known_elsewhere or unknown_flag(occurrence.name, own_flags))
    if unknown:
        raise UserError(one_message(unknown, "flags"))
    if custom is not None:
        for name, value in custom.parse(custom_words, from_files=carried).items():
            (values if name in FLAG_SPECS else carried)[name] = value


def _field(name: str) -> tuple[FlagSpec | None, bool]:
    """The field a flag sets, and whether it is written as --no-<switch>."""
    spec = _BY_FLAG.get(name)
    if spec is None and name.startswith("no-"):
        positive = _BY_FLAG.get(name[3:])
        return (positive, True) if positive is not None and positive.kind == "bool" else (None, False)
    return spec, False


def _field_value(spec: FlagSpec, occurrence: Occurrence, negated: bool) -> Any:
    if spec.kind == "bool":
        if not occurrence.words:
            return not negated
        if negated or len(occurrence.words) > 1 or occurrence.words[0].lower() not in ("true", "false"):
            _unexpected(occurrence, occurrence.words[0])
        return coerce(spec, occurrence.words[0], occurrence.shown)
    if len(occurrence.words) > 1 and spec.kind not in ("strs", "ints", "pairs"):
        _unexpected(occurrence, occurrence.words[1])
    return parse_text(spec, occurrence.words, occurrence.shown)


def _carried_value(occurrence: Occurrence) -> Any:
    kind = _megatron_kind(occurrence.name)
    if kind is not None:
        return _megatron_value(occurrence, kind)
    guesses = [guess(word) for word in occurrence.words]
    if not guesses:
        return True
    return guesses[0] if len(guesses) == 1 else guesses


def _turns_field_off(flag: str) -> bool:
    return flag.startswith("no-") and flag not in MEGATRON_FLAGS and FIELD_FLAGS.get(flag[3:]) == SWITCH


def _megatron_kind(flag: str) -> str | None:
    return MEGATRON_FLAGS.get(flag) or FIELD_FLAGS.get(flag)


def _megatron_value(occurrence: Occurrence, kind: str) -> Any:
    words = occurrence.words
    if kind == SWITCH:
        return True if not words else _unexpected(occurrence, words[0])
    if not words:
        raise UserError(f"{occurrence.shown} needs a value")
    if kind == TEXTS:
        return list(words)
    if len(words) > 1:
        _unexpected(occurrence, words[1])
    if kind not in (INT, FLOAT, NUMBER):
        return words[0]
    number = guess(words[0])
    if isinstance(number, bool) or not isinstance(number, int | float) or (kind == INT and isinstance(number, float)):
        raise UserError(f"{occurrence.shown} must be a {'whole ' if kind == INT else ''}number, not {words[0]!r}")
    return float(number) if kind == FLOAT else number


def unknown_flag(name: str, own_flags: Iterable[str] = ()) -> str:
    """The sentence for a flag nobody here knows: its name here, or the nearest one that somebody does know."""
    hint = foreign_hint(name)
    if hint is not None:
        return hint
    with_effect = [flag for flag, spec in _BY_FLAG.items() if spec.info.no_effect is None]
    megatron = [flag for flag, role in MEGATRON_CLASSES.items() if role != OTHERS]
    match = nearest(name, [*with_effect, *_FILE_FLAGS, *own_flags, *megatron, *FIELD_FLAGS, *REFUSED])
    return f"unknown flag --{name}" + (f": did you mean --{match}?" if match else " (slime flags lists all)")


def _take_file(
    path: str,
    values: dict[str, Any],
    carried: dict[str, Any],
    *,
    what: str,
    custom: _CustomParser | None = None,
) -> None:
    _take_settings(read_config_file(path, what=what), path, values, carried, custom)


def _take_settings(
    settings: Mapping[str, Any],
    path: str,
    values: dict[str, Any],
    carried: dict[str, Any],
    custom: _CustomParser | None = None,
) -> None:
    own_flags = custom.names if custom is not None else {}
    unknown: list[str] = []
    for key, value in settings.items():
        flag = key.replace("_", "-")
        spec = _BY_FLAG.get(flag)
        where = f"{key} in {path}"
        if key == "carried" and isinstance(value, Mapping):
            _take_carried(plain_value(value, where), where, values, carried)
        elif spec is not None:
            if value is not None:
                values[spec.name] = coerce(spec, value, where)
        elif flag in own_flags or _is_carried(flag):
            carried[flag.replace("-", "_")] = plain_value(value, where)
        else:
            unknown.append(_unknown_key(key, flag, path))
    if unknown:
        raise UserError(one_message(unknown, "keys"))


def _take_carried(saved: Mapping[str, Any], where: str, values: dict[str, Any], carried: dict[str, Any]) -> None:
    """What a saved config carried; a flag that has become a field since then sets it."""
    for name, value in saved.items():
        spec = FLAG_SPECS.get(name)
        if spec is None:
            carried[name] = value
        elif value is not None:
            values[name] = coerce(spec, value, f"{name} of {where}")


def _take_custom_file(path: str, values: dict[str, Any], carried: dict[str, Any]) -> None:
    """Every entry is set: on the flag of its name, over whatever else says, or for plugins to read as `args.<name>`."""
    carried["custom_config_path"] = path
    for key, value in read_config_file(path, what="--custom-config-path").items():
        flag, name, where = key.replace("_", "-"), key.replace("-", "_"), f"{key} in {path}"
        spec = _BY_FLAG.get(flag)
        if spec is not None:
            values[spec.name] = None if value is None else _in_range(spec, coerce(spec, value, where), where)
            if value is None and spec.default is not None:
                raise UserError(f"{where} must have a value: drop the key for the default")
        elif (sentence := refusal(flag)) is not None:
            raise UserError(f"{path}: {sentence}")
        elif hasattr(Config, name) or flag in _FILE_FLAGS:
            raise UserError(f"{where} is taken: args.{name} has a meaning already, rename the key")
        else:
            carried[name] = plain_value(value, where)


def _in_range(spec: FlagSpec, value: Any, where: str) -> Any:
    complaint = spec.info.check(value) if spec.info.check else None
    if complaint:
        raise UserError(f"{where} {complaint}, not {value}")
    return value


def flags_of_custom_file(path: str) -> dict[str, Any]:
    """The entries of such a file that set flags, by flag, as they may be shown."""
    entries = read_config_file(path, what="--custom-config-path").items()
    named = ((_BY_FLAG.get(key.replace("_", "-")), value) for key, value in entries)
    return {spec.flag: "(not shown)" if spec.info.secret else value for spec, value in named if spec is not None}


def near_flags_of_custom_file(path: str) -> dict[str, str]:
    """The entries of such a file that are no flags but spelled almost like one, with its name."""
    own = [key.replace("-", "_") for key in read_config_file(path, what="--custom-config-path")]
    near = {key: nearest(key, FLAG_SPECS, cutoff=0.9) for key in own if key.replace("_", "-") not in _BY_FLAG}
    return {key: match for key, match in near.items() if match is not None}


def _is_carried(flag: str) -> bool:
    return _megatron_kind(flag) is not None or (flag.startswith(_CARRIED_PREFIXES) and refusal(flag) is None)


def _unknown_key(key: str, flag: str, path: str) -> str:
    sentence = refusal(flag) or foreign_hint(flag, shown=key)
    if sentence is not None:
        return f"{path}: {sentence}"
    return f"unknown key {key} in {path}{did_you_mean(key.replace('-', '_'), FLAG_SPECS)}"


def _single_word(occurrence: Occurrence) -> str:
    if not occurrence.words:
        raise UserError(f"{occurrence.shown} needs a file")
    if len(occurrence.words) > 1:
        _unexpected(occurrence, occurrence.words[1])
    return occurrence.words[0]


def _unexpected(occurrence: Occurrence, word: str) -> NoReturn:
    raise UserError(f"unexpected argument {word!r} after {occurrence.shown}")


class _CustomParser(argparse.ArgumentParser):
    """The flags of a user's own driver; its defaults and values end up in `carried`."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)

    @property
    def names(self) -> dict[str, str]:
        return {option.lstrip("-").replace("_", "-"): option for option in self._option_string_actions}

    def owns(self, name: str) -> bool:
        return name in self.names

    def spelling(self, name: str) -> str:
        return self.names[name]

    def parse(self, words: Sequence[str], *, from_files: Mapping[str, Any]) -> dict[str, Any]:
        """Values of the custom flags; those read from files take the place of their defaults."""
        own = {action.dest for action in self._actions}
        self.set_defaults(**{name: value for name, value in from_files.items() if name in own})
        found = vars(self.parse_args(list(words)))
        return {name: plain_value(value, f"custom flag {name}") for name, value in found.items()}

    def error(self, message: str) -> NoReturn:
        raise UserError(f"custom flags: {message}")


def _custom_parser(add_custom_arguments: AddCustomArguments | None) -> _CustomParser | None:
    if add_custom_arguments is None:
        return None
    parser = _CustomParser()
    add_custom_arguments(parser)
    for name in parser.names:
        if name in _BY_FLAG and name not in FOR_PLUGINS:
            raise UserError(f"custom flag --{name} exists already in slime: give it another name")
    return parser


_BY_FLAG: dict[str, FlagSpec] = {
    spelling.replace("_", "-"): spec for spec in FLAG_SPECS.values() for spelling in (spec.name, *spec.info.aliases)
}
