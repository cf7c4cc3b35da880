"""Parser of command lines, config files and keyword arguments into a `Config`.

Invariant: no word is ignored. A flag is a config field, a carried-through flag (sglang-*, router-*, Megatron's, the
user's own), a known flag that this version does not support, or an error that suggests the nearest name. Precedence,
lowest first: defaults, --config files in order, the command line, --custom-config-path files in order, which also hold
the user's own entries.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from slime.config.config import FLAG_SPECS, Config, check_range, coerce, plain_value, read_config_file
from slime.config.fields import (
    FlagSpec,
    did_you_mean,
    nearest_name,
)
from slime.config.flag_aliases import REFUSED, foreign_hint, foreign_setting, join_unknown_names, refusal
from slime.config.help import FILE_FLAGS, format_help, format_short_help
from slime.config.megatron_flags import (
    FIELD_FLAGS,
    FLOAT,
    INT,
    MEGATRON_CLASSES,
    MEGATRON_FLAGS,
    OTHERS,
    SWITCH,
    TEXT,
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
_BY_FLAG: dict[str, FlagSpec] = {
    spelling.replace("_", "-"): spec for spec in FLAG_SPECS.values() for spelling in (spec.name, *spec.info.aliases)
}

_log = logging.getLogger(__name__)


def parse_args(argv: Sequence[str] | None = None, add_custom_arguments: AddCustomArguments | None = None) -> Config:
    """Parse, resolve and check a command line (default: sys.argv[1:])."""
    return resolve(parse_flags(argv, add_custom_arguments))


def parse_flags(
    argv: Sequence[str] | None = None,
    add_custom_arguments: AddCustomArguments | None = None,
    *,
    given_file: tuple[JsonMapping, str] | None = None,
) -> Config:
    """Parse a command line into a config; nothing is derived or checked, but all unknown flags are refused together.

    With `given_file`, the settings of a file and its name, the command line can name no files.
    """
    # the flags, with dashes in their names, and the words that follow; settings of other libraries are not changed
    line: list[tuple[str, list[str]]] = []
    for word in sys.argv[1:] if argv is None else argv:
        if word in ("-h", "--help"):
            line.append(("help", []))
        elif foreign_setting(word) is not None:
            line.append((word, []))
        elif _FLAG.match(word):
            name, equals, after = word[2:].partition("=")
            line.append((name.replace("_", "-"), [after] if equals else []))
        elif not line:
            raise UserError(f"unexpected argument {word!r}: flags start with two dashes")
        else:
            line[-1][1].append(word)
    custom = None if add_custom_arguments is None else _CustomParser(add_custom_arguments)
    own_flags = {} if custom is None else custom.names
    # the files below the command line
    given = _GivenValues(own_flags)
    if given_file is not None:
        given.add_settings(*given_file)
        for name, _ in line:
            if name in (*_FILE_FLAGS, "help", "help-all"):
                raise UserError(f"--{name} cannot be combined with {given_file[1]}: put its content into that file")
    elif any(name in ("help", "help-all") for name, _ in line):
        print(format_help() if ("help-all", []) in line else format_short_help(), end="")
        if custom is not None:
            print(f"\nFlags of this driver\n{custom.format_help()}", end="")
        raise SystemExit(0)
    for path in (_only_word(name, words, "a file") for name, words in line if name == "config"):
        given.add_settings(read_config_file(path), path)
    # the command line
    custom_words: list[str] = []
    unknown: list[str] = []
    repeated: dict[str, list[object]] = {}
    for name, words in line:
        spec, is_negated = _BY_FLAG.get(name), False
        if spec is None and name.startswith("no-"):
            switch = _BY_FLAG.get(name[3:])
            is_negated = switch is not None and switch.kind == "bool"
            spec = switch if is_negated else None
        if name in own_flags:
            custom_words += [own_flags[name], *words]
        elif spec is not None:
            value: Any = words
            if spec.kind == "bool":
                if words and (is_negated or len(words) > 1 or words[0].lower() not in ("true", "false")):
                    _refuse_word(name, words[0])
                value = words[0] if words else not is_negated
            elif spec.kind not in ("strs", "ints", "pairs") or not words:
                value = _only_word(name, words, f"a value ({spec.metavar})")
            elif spec.kind == "pairs" and len(words) == 1 and not words[0].startswith("-"):
                _log.warning("--%s %s has no name: it is named aime, as in upstream slime", name, words[0])
                value = ["aime", *words]
            elif spec.kind == "pairs" and len(words) % 2:
                raise UserError(f"--{name} takes pairs NAME PATH, but got {len(words)} values: {' '.join(words)}")
            value = coerce(spec, value, f"--{name}")
            if spec.info.repeat:
                value = repeated[spec.name] = [*repeated.get(spec.name, ()), *value]
            given.values[spec.name] = value
        elif name[:3] == "no-" and name not in MEGATRON_FLAGS and FIELD_FLAGS.get(name[3:]) == SWITCH:
            given.carried[name[3:].replace("-", "_")] = not _carried_value(name, words, SWITCH)
        elif _is_carried(name):
            given.carried[name.replace("-", "_")] = _carried_value(name, words)
        elif name not in _FILE_FLAGS:
            unknown.append(foreign_setting(name) or refusal(name) or _describe_unknown(name, own_flags))
    if unknown:
        raise UserError(join_unknown_names(unknown, "flags"))
    if custom is not None:
        for name, value in custom.parse(custom_words, from_files=given.carried).items():
            (given.values if name in FLAG_SPECS else given.carried)[name] = value
    # the files above it
    for path in (_only_word(name, words, "a file") for name, words in line if name == "custom-config-path"):
        given.add_custom_file(path)
    return Config(**given.values, carried=given.carried)


def config_from_keywords(keywords: JsonMapping) -> Config:
    """Build a config from keyword arguments; like `parse_flags`, it derives and checks nothing."""
    named = dict(keywords)
    files, custom_file = named.pop("config", None) or (), named.pop("custom_config_path", None)
    given = _GivenValues()
    for file in [files] if isinstance(files, str | os.PathLike) else files:
        given.add_settings(read_config_file(os.fspath(file), what="config"), os.fspath(file))
    given.carried |= named.pop("carried", None) or {}
    for name, value in named.items():
        flag = name.replace("_", "-")
        if flag not in _BY_FLAG and _is_carried(flag):
            given.carried[name] = plain_value(value, name)
        else:
            given.values[_BY_FLAG[flag].name if flag in _BY_FLAG else name] = value
    config = Config.from_dict({**given.values, "carried": given.carried})
    if custom_file is None:
        return config
    over = _GivenValues()
    over.add_custom_file(os.fspath(custom_file))
    return config.replace(**over.values, carried={**config.carried, **over.carried})


class _GivenValues:
    """The values of fields and the carried flags that files, command lines and keywords give; later ones win."""

    def __init__(self, own_flags: Collection[str] = ()) -> None:
        self.own_flags = own_flags  # of a custom driver
        self.values: JsonObject = {}
        self.carried: JsonObject = {}

    def add_settings(self, settings: JsonMapping, path: str) -> None:
        """Add the entries of a --config file; all unknown ones are refused together."""
        unknown: list[str] = []
        for key, value in settings.items():
            flag, where = key.replace("_", "-"), f"{key} in {path}"
            spec = _BY_FLAG.get(flag)
            if key == "carried" and isinstance(value, Mapping):
                for name, saved in plain_value(value, where).items():
                    field = FLAG_SPECS.get(name)
                    if field is None:
                        self.carried[name] = saved
                    elif saved is not None:  # a carried flag that has become a field since the config was saved
                        self.values[name] = coerce(field, saved, f"{name} of {where}")
            elif spec is not None:
                if value is not None:
                    self.values[spec.name] = coerce(spec, value, where)
            elif flag in self.own_flags or _is_carried(flag):
                self.carried[flag.replace("-", "_")] = plain_value(value, where)
            elif (sentence := refusal(flag) or foreign_hint(flag, shown=key)) is not None:
                unknown.append(f"{path}: {sentence}")
            else:
                unknown.append(f"unknown key {key} in {path}{did_you_mean(key.replace('-', '_'), FLAG_SPECS)}")
        if unknown:
            raise UserError(join_unknown_names(unknown, "keys"))

    def add_custom_file(self, path: str) -> None:
        """Add a --custom-config-path file: entries override flags, or become `args.<name>` for plugins."""
        self.carried["custom_config_path"] = path
        for key, value in read_config_file(path, what="--custom-config-path").items():
            flag, name, where = key.replace("_", "-"), key.replace("-", "_"), f"{key} in {path}"
            spec = _BY_FLAG.get(flag)
            if spec is not None:
                if value is not None:
                    value = coerce(spec, value, where)
                    check_range(spec, value, where)
                elif spec.default is not None:
                    raise UserError(f"{where} must have a value: drop the key for the default")
                self.values[spec.name] = value
            elif (sentence := refusal(flag)) is not None:
                raise UserError(f"{path}: {sentence}")
            elif hasattr(Config, name) or flag in _FILE_FLAGS:
                raise UserError(f"{where} is reserved: args.{name} already has a meaning, rename the key")
            else:
                self.carried[name] = plain_value(value, where)


def _carried_value(name: str, words: list[str], kind: str | None = None) -> object:
    """Return the value of a carried flag: of Megatron's type, or of the likeliest one."""
    kind = kind or MEGATRON_FLAGS.get(name) or FIELD_FLAGS.get(name)
    if kind is None:
        guesses = [_guess(word) for word in words] or [True]
        return guesses[0] if len(guesses) == 1 else guesses
    if kind == SWITCH:
        return True if not words else _refuse_word(name, words[0])
    if kind == TEXTS and words:
        return words
    word = _only_word(name, words, "a value")
    number = _guess(word)
    if kind == TEXT:
        return word
    if isinstance(number, bool) or not isinstance(number, int | float) or (kind == INT and isinstance(number, float)):
        raise UserError(f"--{name} must be a {'whole ' if kind == INT else ''}number, not {word!r}")
    return float(number) if kind == FLOAT else number


def _guess(text: str) -> object:
    """Convert a carried-through value to its likeliest type: true/false, whole number, number, or the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _is_carried(flag: str) -> bool:
    is_megatron = flag in MEGATRON_FLAGS or flag in FIELD_FLAGS
    return is_megatron or (flag.startswith(_CARRIED_PREFIXES) and refusal(flag) is None)


def _only_word(name: str, words: list[str], needed: str) -> str:
    if not words:
        raise UserError(f"--{name} needs {needed}")
    return words[0] if len(words) == 1 else _refuse_word(name, words[1])


def _refuse_word(name: str, word: str) -> NoReturn:
    raise UserError(f"unexpected argument {word!r} after --{name}")


def _describe_unknown(name: str, own_flags: Iterable[str]) -> str:
    """Return the sentence for an unknown flag: its name here if another library has it, else the nearest name."""
    hint = foreign_hint(name)
    if hint is not None:
        return hint
    with_effect = [flag for flag, spec in _BY_FLAG.items() if spec.info.no_effect is None]
    megatron = [flag for flag, role in MEGATRON_CLASSES.items() if role != OTHERS]
    match = nearest_name(name, [*with_effect, *_FILE_FLAGS, *own_flags, *megatron, *FIELD_FLAGS, *REFUSED])
    return f"unknown flag --{name}" + (f": did you mean --{match}?" if match else " (slime flags lists all)")


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


class _CustomParser(argparse.ArgumentParser):
    """Parser of the flags of a custom driver; their defaults and values are put into `carried`."""

    def __init__(self, add_custom_arguments: AddCustomArguments) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        add_custom_arguments(self)
        for name in self.names:
            if name in _BY_FLAG and name not in FOR_PLUGINS:
                raise UserError(f"custom flag --{name} already exists in slime: give it another name")

    @property
    def names(self) -> dict[str, str]:
        """Each flag as it is compared, with its spelling."""
        return {option.lstrip("-").replace("_", "-"): option for option in self._option_string_actions}

    def parse(self, words: Sequence[str], *, from_files: JsonMapping) -> JsonObject:
        """Parse the custom flags; values from files replace their defaults."""
        own = {action.dest for action in self._actions}
        self.set_defaults(**{name: value for name, value in from_files.items() if name in own})
        found = vars(self.parse_args(list(words)))
        return {name: plain_value(value, f"custom flag {name}") for name, value in found.items()}

    def error(self, message: str) -> NoReturn:
        raise UserError(f"custom flags: {message}")
