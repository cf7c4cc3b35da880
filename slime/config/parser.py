"""Parser of command lines, config files and keyword arguments into a `Config`.

Invariant: no word is ignored. A flag is a config field, a carried-through flag (sglang-*, router-*, Megatron's, the
user's own), a known flag that this version does not support, or an error that suggests the nearest name. Precedence,
lowest first: defaults, --config files in order, the command line, --custom-config-path files in order, which also hold
the user's own entries.
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
from slime.config.fields import (
    FlagSpec,
    coerce,
    did_you_mean,
    guess,
    join_unknown_names,
    nearest_name,
    parse_text,
    plain_value,
)
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
from slime.storage.json_types import JsonMapping, JsonObject

AddCustomArguments = Callable[[argparse.ArgumentParser], "argparse.ArgumentParser | None"]

_FLAG = re.compile(r"--[A-Za-z]")
_CARRIED_PREFIXES = ("sglang-", "router-")
FOR_PLUGINS = ("max-turns",)
"""Flags that only plugins read: a custom driver may declare them itself."""
_FILE_FLAGS = tuple(name[2:] for name, metavar, _ in FILE_FLAGS if metavar)


@dataclasses.dataclass(frozen=True)
class GivenFlag:
    """One flag of a command line, with its words."""

    name: str
    """Without leading dashes, parts joined by dashes; settings in the form of other libraries are not changed."""
    words: tuple[str, ...]

    @property
    def shown(self) -> str:
        return f"--{self.name}"


def parse_args(argv: Sequence[str] | None = None, add_custom_arguments: AddCustomArguments | None = None) -> Config:
    """Parse, resolve and check a command line (default: sys.argv[1:])."""
    return resolve(parse_flags(argv, add_custom_arguments))


def parse_flags(argv: Sequence[str] | None = None, add_custom_arguments: AddCustomArguments | None = None) -> Config:
    """Parse a command line into a config; nothing is derived or checked."""
    occurrences = scan(sys.argv[1:] if argv is None else argv)
    custom: _CustomParser | None = None
    if add_custom_arguments is not None:
        custom = _CustomParser()
        add_custom_arguments(custom)
        for name in custom.names:
            if name in _BY_FLAG and name not in FOR_PLUGINS:
                raise UserError(f"custom flag --{name} already exists in slime: give it another name")
    if any(occurrence.name == "help" for occurrence in occurrences):
        print(format_help(), end="")
        if custom is not None:
            print(f"\nFlags of this driver\n{custom.format_help()}", end="")
        raise SystemExit(0)
    values: JsonObject = {}
    carried: JsonObject = {}
    for occurrence in occurrences:
        if occurrence.name == "config":
            _apply_file(_single_word(occurrence), values, carried, what="--config", custom=custom)
    _apply_command_line(occurrences, custom, values, carried)
    for occurrence in occurrences:
        if occurrence.name == "custom-config-path":
            _apply_custom_file(_single_word(occurrence), values, carried)
    return Config(**values, carried=carried)


def config_from_settings(settings: JsonMapping, origin: str, argv: Sequence[str] = ()) -> Config:
    """Build a config from `settings`, instead of a --config file `origin`, and a command line; nothing is derived."""
    values: JsonObject = {}
    carried: JsonObject = {}
    _apply_settings(settings, origin, values, carried)
    occurrences = scan(argv)
    for occurrence in occurrences:
        if occurrence.name in (*_FILE_FLAGS, "help"):
            raise UserError(f"{occurrence.shown} cannot be combined with {origin}: put its content into that file")
    _apply_command_line(occurrences, None, values, carried)
    return Config(**values, carried=carried)


def config_from_keywords(keywords: JsonMapping) -> Config:
    """Build a config from keyword arguments; like `parse_flags`, it derives and checks nothing."""
    given = dict(keywords)
    files, custom_file = given.pop("config", None) or (), given.pop("custom_config_path", None)
    values: JsonObject = {}
    carried: JsonObject = {}
    for file in [files] if isinstance(files, str | os.PathLike) else files:
        _apply_file(os.fspath(file), values, carried, what="config")
    carried |= given.pop("carried", None) or {}
    named: JsonObject = {}
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
    over: JsonObject = {}
    _apply_custom_file(os.fspath(custom_file), over, carried)
    return config.replace(**over, carried=carried)


def scan(argv: Sequence[str]) -> list[GivenFlag]:
    """Split a command line into flags and their words; `--flag=value` and `--flag value` are equivalent."""
    occurrences: list[GivenFlag] = []
    for word in argv:
        if word in ("-h", "--help"):
            occurrences.append(GivenFlag("help", ()))
        elif foreign_setting(word) is not None:
            occurrences.append(GivenFlag(word, ()))
        elif _FLAG.match(word):
            name, equals, value = word[2:].partition("=")
            occurrences.append(GivenFlag(name.replace("_", "-"), (value,) if equals else ()))
        elif not occurrences:
            raise UserError(f"unexpected argument {word!r}: flags start with two dashes")
        else:
            last = occurrences.pop()
            occurrences.append(GivenFlag(last.name, (*last.words, word)))
    return occurrences


def _apply_command_line(
    occurrences: Iterable[GivenFlag],
    custom: _CustomParser | None,
    values: JsonObject,
    carried: JsonObject,
) -> None:
    repeated: dict[str, list[object]] = {}
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
        elif (
            occurrence.name.startswith("no-")
            and occurrence.name not in MEGATRON_FLAGS
            and FIELD_FLAGS.get(occurrence.name[3:]) == SWITCH
        ):
            carried[occurrence.name[3:].replace("-", "_")] = not _megatron_value(occurrence, SWITCH)
        elif _is_carried(occurrence.name):
            carried[occurrence.name.replace("-", "_")] = _carried_value(occurrence)
        elif occurrence.name not in _FILE_FLAGS:
            own_flags = custom.names if custom is not None else ()
            known_elsewhere = foreign_setting(occurrence.name) or refusal(occurrence.name)
            unknown.append(known_elsewhere or unknown_flag(occurrence.name, own_flags))
    if unknown:
        raise UserError(join_unknown_names(unknown, "flags"))
    if custom is not None:
        for name, value in custom.parse(custom_words, from_files=carried).items():
            (values if name in FLAG_SPECS else carried)[name] = value


def _field(name: str) -> tuple[FlagSpec | None, bool]:
    """Return the spec of a flag, None for other names, and whether it is written as --no-<switch>."""
    spec = _BY_FLAG.get(name)
    if spec is None and name.startswith("no-"):
        positive = _BY_FLAG.get(name[3:])
        return (positive, True) if positive is not None and positive.kind == "bool" else (None, False)
    return spec, False


def _field_value(spec: FlagSpec, occurrence: GivenFlag, negated: bool) -> Any:
    if spec.kind == "bool":
        if not occurrence.words:
            return not negated
        if negated or len(occurrence.words) > 1 or occurrence.words[0].lower() not in ("true", "false"):
            _refuse_word(occurrence, occurrence.words[0])
        return coerce(spec, occurrence.words[0], occurrence.shown)
    if len(occurrence.words) > 1 and spec.kind not in ("strs", "ints", "pairs"):
        _refuse_word(occurrence, occurrence.words[1])
    return parse_text(spec, occurrence.words, occurrence.shown)


def _carried_value(occurrence: GivenFlag) -> object:
    kind = _megatron_kind(occurrence.name)
    if kind is not None:
        return _megatron_value(occurrence, kind)
    guesses = [guess(word) for word in occurrence.words]
    if not guesses:
        return True
    return guesses[0] if len(guesses) == 1 else guesses


def _megatron_kind(flag: str) -> str | None:
    return MEGATRON_FLAGS.get(flag) or FIELD_FLAGS.get(flag)


def _megatron_value(occurrence: GivenFlag, kind: str) -> object:
    words = occurrence.words
    if kind == SWITCH:
        return True if not words else _refuse_word(occurrence, words[0])
    if not words:
        raise UserError(f"{occurrence.shown} needs a value")
    if kind == TEXTS:
        return list(words)
    if len(words) > 1:
        _refuse_word(occurrence, words[1])
    if kind not in (INT, FLOAT, NUMBER):
        return words[0]
    number = guess(words[0])
    if isinstance(number, bool) or not isinstance(number, int | float) or (kind == INT and isinstance(number, float)):
        raise UserError(f"{occurrence.shown} must be a {'whole ' if kind == INT else ''}number, not {words[0]!r}")
    return float(number) if kind == FLOAT else number


def unknown_flag(name: str, own_flags: Iterable[str] = ()) -> str:
    """Return the sentence for an unknown flag: its name here if another library has it, else the nearest name."""
    hint = foreign_hint(name)
    if hint is not None:
        return hint
    with_effect = [flag for flag, spec in _BY_FLAG.items() if spec.info.no_effect is None]
    megatron = [flag for flag, role in MEGATRON_CLASSES.items() if role != OTHERS]
    match = nearest_name(name, [*with_effect, *_FILE_FLAGS, *own_flags, *megatron, *FIELD_FLAGS, *REFUSED])
    return f"unknown flag --{name}" + (f": did you mean --{match}?" if match else " (slime flags lists all)")


def _apply_file(
    path: str,
    values: JsonObject,
    carried: JsonObject,
    *,
    what: str,
    custom: _CustomParser | None = None,
) -> None:
    _apply_settings(read_config_file(path, what=what), path, values, carried, custom)


def _apply_settings(
    settings: JsonMapping,
    path: str,
    values: JsonObject,
    carried: JsonObject,
    custom: _CustomParser | None = None,
) -> None:
    own_flags = custom.names if custom is not None else {}
    unknown: list[str] = []
    for key, value in settings.items():
        flag = key.replace("_", "-")
        spec = _BY_FLAG.get(flag)
        where = f"{key} in {path}"
        if key == "carried" and isinstance(value, Mapping):
            for name, saved in plain_value(value, where).items():
                field = FLAG_SPECS.get(name)
                if field is None:
                    carried[name] = saved
                elif saved is not None:  # a carried flag that has become a field since the config was saved
                    values[name] = coerce(field, saved, f"{name} of {where}")
        elif spec is not None:
            if value is not None:
                values[spec.name] = coerce(spec, value, where)
        elif flag in own_flags or _is_carried(flag):
            carried[flag.replace("-", "_")] = plain_value(value, where)
        else:
            sentence = refusal(flag) or foreign_hint(flag, shown=key)
            if sentence is None:
                unknown.append(f"unknown key {key} in {path}{did_you_mean(key.replace('-', '_'), FLAG_SPECS)}")
            else:
                unknown.append(f"{path}: {sentence}")
    if unknown:
        raise UserError(join_unknown_names(unknown, "keys"))


def _apply_custom_file(path: str, values: JsonObject, carried: JsonObject) -> None:
    """Apply a --custom-config-path file: entries override flags, or become `args.<name>` for plugins."""
    carried["custom_config_path"] = path
    for key, value in read_config_file(path, what="--custom-config-path").items():
        flag, name, where = key.replace("_", "-"), key.replace("-", "_"), f"{key} in {path}"
        spec = _BY_FLAG.get(flag)
        if spec is not None:
            if value is not None:
                value = coerce(spec, value, where)
                complaint = spec.info.check(value) if spec.info.check else None
                if complaint:
                    raise UserError(f"{where} {complaint}, not {value}")
            values[spec.name] = value
            if value is None and spec.default is not None:
                raise UserError(f"{where} must have a value: drop the key for the default")
        elif (sentence := refusal(flag)) is not None:
            raise UserError(f"{path}: {sentence}")
        elif hasattr(Config, name) or flag in _FILE_FLAGS:
            raise UserError(f"{where} is reserved: args.{name} already has a meaning, rename the key")
        else:
            carried[name] = plain_value(value, where)


def custom_file_flags(path: str) -> JsonObject:
    """Return the entries of a --custom-config-path file that set flags, with secrets masked."""
    entries = read_config_file(path, what="--custom-config-path").items()
    named = ((_BY_FLAG.get(key.replace("_", "-")), value) for key, value in entries)
    return {spec.flag: "(not shown)" if spec.info.secret else value for spec, value in named if spec is not None}


def misspelled_custom_file_keys(path: str) -> dict[str, str]:
    """Return the entries of a --custom-config-path file that are almost spelled like a flag, with its name."""
    own = [key.replace("-", "_") for key in read_config_file(path, what="--custom-config-path")]
    near = {key: nearest_name(key, FLAG_SPECS, cutoff=0.9) for key in own if key.replace("_", "-") not in _BY_FLAG}
    return {key: match for key, match in near.items() if match is not None}


def _is_carried(flag: str) -> bool:
    return _megatron_kind(flag) is not None or (flag.startswith(_CARRIED_PREFIXES) and refusal(flag) is None)


def _single_word(occurrence: GivenFlag) -> str:
    if not occurrence.words:
        raise UserError(f"{occurrence.shown} needs a file")
    if len(occurrence.words) > 1:
        _refuse_word(occurrence, occurrence.words[1])
    return occurrence.words[0]


def _refuse_word(occurrence: GivenFlag, word: str) -> NoReturn:
    raise UserError(f"unexpected argument {word!r} after {occurrence.shown}")


class _CustomParser(argparse.ArgumentParser):
    """Parser of the flags of a custom driver; their defaults and values are put into `carried`."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)

    @property
    def names(self) -> dict[str, str]:
        return {option.lstrip("-").replace("_", "-"): option for option in self._option_string_actions}

    def owns(self, name: str) -> bool:
        return name in self.names

    def spelling(self, name: str) -> str:
        return self.names[name]

    def parse(self, words: Sequence[str], *, from_files: JsonMapping) -> JsonObject:
        """Parse the custom flags; values from files replace their defaults."""
        own = {action.dest for action in self._actions}
        self.set_defaults(**{name: value for name, value in from_files.items() if name in own})
        found = vars(self.parse_args(list(words)))
        return {name: plain_value(value, f"custom flag {name}") for name, value in found.items()}

    def error(self, message: str) -> NoReturn:
        raise UserError(f"custom flags: {message}")


_BY_FLAG: dict[str, FlagSpec] = {
    spelling.replace("_", "-"): spec for spec in FLAG_SPECS.values() for spelling in (spec.name, *spec.info.aliases)
}
