"""The one configuration object: flat, frozen, typed; each field is one flag.

Invariant: `Config.from_dict(config.to_dict()) == config`, and everything that is not a field is in `carried`, where
attribute access finds it. Configs are saved to and read from TOML or YAML files with the names of the flags.
Invariant: a value that `coerce` returns has exactly the type of its field, so files, command line and Python calls
give equal configs for equal input.
Invariant: `load_config` returns the config that `save_config` wrote, carried flags included.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from slime.config.fields import FlagSpec, did_you_mean, specs_of_group
from slime.config.flag_aliases import foreign_hint, join_unknown_names, refusal, with_keyword_names
from slime.config.flags.algorithm import AlgorithmFlags, CorrectionFlags, CriticFlags, DistillationFlags
from slime.config.flags.cluster import ClusterFlags, EngineFlags, WeightFlags
from slime.config.flags.data import DataFlags, EvalFlags
from slime.config.flags.logging import DebugFlags, LoggingFlags
from slime.config.flags.megatron import MegatronFlags
from slime.config.flags.rollout import AgentFlags, AsyncFlags, LiveFlags, RewardFlags, RolloutFlags
from slime.config.flags.training import CheckpointFlags, LoraFlags, ModelFlags, OptimizerFlags
from slime.config.flags.upstream import UpstreamFlags
from slime.config.plugins.args import Overlay
from slime.errors import UserError
from slime.storage.json_types import JsonMapping, JsonObject


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(
    ModelFlags,
    DataFlags,
    RolloutFlags,
    AgentFlags,
    LiveFlags,
    AsyncFlags,
    RewardFlags,
    EvalFlags,
    AlgorithmFlags,
    CorrectionFlags,
    CriticFlags,
    DistillationFlags,
    OptimizerFlags,
    LoraFlags,
    CheckpointFlags,
    ClusterFlags,
    MegatronFlags,
    EngineFlags,
    WeightFlags,
    LoggingFlags,
    DebugFlags,
    UpstreamFlags,
):
    """All settings of a run. Plugins get a writable view of it as `args` and read `args.<flag_name>`."""

    carried: JsonObject = dataclasses.field(default_factory=dict)
    """Flags passed through to other programs: sglang_*, router_*, Megatron's, and the user's own."""

    overlay: Overlay = dataclasses.field(default_factory=Overlay, compare=False, repr=False)
    """The `args` of plugins (`slime.config.plugins.view`): shared by all copies, not read by the run itself."""

    if not TYPE_CHECKING:  # type checkers still report attributes that are not fields

        def __getattr__(self, name: str) -> object:
            carried = self.__dict__.get("carried", {})
            if name in carried:
                return carried[name]
            raise AttributeError(
                f"the config has no {name}: neither a flag --{name.replace('_', '-')} nor a carried one"
            )

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_dict(), sort_keys=True))

    def replace(self, **changes: Any) -> Config:
        """Return a copy with some fields changed; nothing is derived or checked again."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> JsonObject:
        """Return all fields except secrets as plain JSON values, in the order of the groups."""
        plain = {spec.name: _plain(getattr(self, spec.name)) for spec in FLAG_SPECS.values() if not spec.info.secret}
        return {**plain, "carried": _plain(self.carried)}

    @classmethod
    def from_dict(cls, values: JsonMapping) -> Config:
        """Build a config from the dict of `to_dict`; unknown names and wrong types are refused."""
        fields: JsonObject = {}
        unknown: list[str] = []
        for name, value in values.items():
            if name == "carried":
                fields[name] = dict(value)
            elif name in FLAG_SPECS:
                fields[name] = None if value is None else coerce(FLAG_SPECS[name], value, where=name)
            else:
                sentence = refusal(name.replace("_", "-")) or foreign_hint(name, shown=name)
                if sentence is None:
                    unknown.append(f"unknown config key {name}{did_you_mean(name, FLAG_SPECS)}")
                else:
                    unknown.append(with_keyword_names(sentence))
        if unknown:
            raise UserError(join_unknown_names(unknown, "keys"))
        return cls(**fields)


def _plain(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def plain_value(value: object, where: str) -> Any:
    """Convert `value` to JSON types, so that configs can be saved and sent between processes."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_value(item, where) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain_value(item, where) for key, item in value.items()}
    if hasattr(value, "__fspath__") or hasattr(value, "isoformat"):
        return str(value)
    raise UserError(f"{where} has a value of type {type(value).__name__}, which a config cannot hold: use plain values")


FLAG_SPECS: dict[str, FlagSpec] = {spec.name: spec for group in Config.__bases__ for spec in specs_of_group(group)}
"""Every flag by field name, in the order of the groups."""


def given_flags(config: Config, names: Iterable[str]) -> dict[str, str]:
    """Return those of some fields that differ from their defaults: name -> flag and value, as they are written."""
    found: dict[str, str] = {}
    for name in names:
        spec, value = FLAG_SPECS[name], getattr(config, name)
        if value != spec.default and value is not False:
            words = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            found[name] = spec.flag if spec.kind == "bool" else f"{spec.flag} {words}"
    return found


_KIND_NAMES = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "strs": "a list of texts",
    "ints": "a list of whole numbers",
    "dict": 'a JSON object like {"key": 1}',
    "pairs": "pairs of a name and a path",
}


def coerce(spec: FlagSpec, value: object, where: str) -> Any:
    """Convert `value` to the field's type; text is parsed as on the command line."""
    match spec.kind:
        case "bool":
            text = str(value).lower()
            if isinstance(value, bool | str) and text in ("true", "false"):
                return text == "true"
        case "strs" | "ints":
            items = [value] if isinstance(value, str | int) and not isinstance(value, bool) else value
            if isinstance(items, list | tuple):
                return [_scalar(spec, "str" if spec.kind == "strs" else "int", item, where) for item in items]
        case "pairs":
            items = list(value.items()) if isinstance(value, Mapping) else value
            if isinstance(items, list | tuple):
                if len(items) % 2 == 0 and all(isinstance(item, str) for item in items):
                    items = list(zip(items[::2], items[1::2], strict=True))
                if all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in items):
                    return [tuple(_scalar(spec, "str", word, where) for word in pair) for pair in items]
        case "dict":
            if isinstance(value, str):
                try:
                    value = json.loads(value)
                except json.JSONDecodeError as error:
                    wanted = _KIND_NAMES["dict"]
                    raise UserError(f"{where} must be {wanted}, but {value!r} is not JSON: {error}") from error
            if isinstance(value, Mapping):
                return dict(plain_value(value, where))
        case _:
            return _scalar(spec, spec.kind, value, where)
    raise UserError(f"{where} must be {_KIND_NAMES[spec.kind]}, not {value!r}")


def _scalar(spec: FlagSpec, kind: str, value: object, where: str) -> Any:
    """Convert one text (among the choices of the flag) or one number."""
    if kind == "str" and isinstance(value, str | os.PathLike):
        text, info = os.fspath(value), spec.info
        if not info.choices or text in info.choices:
            return text
        if text in info.later:
            choices = " or ".join(info.choices)
            raise UserError(f"{where} {text} exists in slime, but this version does not have it yet: use {choices}")
        hint = did_you_mean(text, info.choices)
        raise UserError(f"{where} must be one of {', '.join(info.choices)}, not {text!r}{hint}")
    if kind != "str" and isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            if kind == "int" and not isinstance(value, float):
                return int(value)
            number = float(value)
            if kind == "float" and not math.isnan(number):
                return number
            if kind == "int" and number.is_integer():
                return int(number)
    raise UserError(f"{where} must be {_KIND_NAMES[spec.kind]}, not {value!r}")


def check_range(spec: FlagSpec, value: object, where: str) -> None:
    """Raise a `UserError` if a value of the field's type is out of its range."""
    complaint = spec.info.check(value) if spec.info.check else None
    if complaint:
        raise UserError(f"{where} {complaint}, not {value}")


RESOLVED = "# The resolved config of a run; "
"""Start of a config file that a run wrote."""


def read_config_file(path: str, *, what: str = "--config") -> JsonObject:
    """Read the top-level mapping of a TOML (.toml) or YAML (.yaml, .yml, .json) file."""
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{what}: there is no file {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{what}: cannot read {path} ({error})") from error
    try:
        content = tomllib.loads(text) if file.suffix == ".toml" else yaml.safe_load(text)
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        kind = "TOML" if file.suffix == ".toml" else "YAML"
        raise UserError(f"{what}: {path} is not valid {kind}: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UserError(f"{what}: {path} must hold a mapping of flag names to values")
    return content


def save_config(config: Config, path: str | Path) -> None:
    """Write the config as YAML; `--config` reads the same config from it."""
    text = yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True, width=120)
    Path(path).write_text(f"{RESOLVED}start it again with --config {path}\n{text}", encoding="utf-8")


def load_config(path: str | Path) -> Config:
    """Read a config that `save_config` wrote."""
    return Config.from_dict(read_config_file(str(path), what="config file"))
