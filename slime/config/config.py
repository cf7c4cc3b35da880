"""The one configuration object: flat, frozen, typed; each field is one flag.

Invariant: `Config.from_dict(config.to_dict()) == config`, and everything that is not a field lives in `carried`,
from where attribute access finds it.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from slime.config.fields import FlagSpec, coerce, did_you_mean, one_message, specs_of_group
from slime.config.flag_aliases import foreign_hint, in_python, refusal
from slime.config.flags.agent import AgentFlags, LiveFlags
from slime.config.flags.algorithm import AlgorithmFlags, CorrectionFlags, CriticFlags, DistillationFlags
from slime.config.flags.cluster import ClusterFlags
from slime.config.flags.data import DataFlags, EvalFlags
from slime.config.flags.engine import EngineFlags, WeightFlags
from slime.config.flags.logging import DebugFlags, LoggingFlags
from slime.config.flags.megatron import MegatronFlags
from slime.config.flags.model import LoraFlags, ModelFlags
from slime.config.flags.optimizer import CheckpointFlags, OptimizerFlags
from slime.config.flags.rollout import AsyncFlags, RewardFlags, RolloutFlags
from slime.config.flags.upstream import UpstreamFlags
from slime.config.plugins.args import Overlay
from slime.errors import UserError

GROUPS: tuple[type, ...] = (
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
)


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
    """Everything a run is told. Plugins get a writable view of it as `args` and read `args.<flag_name>`."""

    carried: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Flags handed through to others: sglang_*, router_*, Megatron's, and the user's own."""

    overlay: Overlay = dataclasses.field(default_factory=Overlay, compare=False, repr=False)
    """What plugins see and write (`slime.config.plugins.view`): shared by all copies, read by no part of the run."""

    if not TYPE_CHECKING:  # for the type checker an attribute that is no field stays an error

        def __getattr__(self, name: str) -> Any:
            carried = self.__dict__.get("carried", {})
            if name in carried:
                return carried[name]
            raise AttributeError(
                f"the config has no {name}: neither a flag --{name.replace('_', '-')} nor a carried one"
            )

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_dict(), sort_keys=True))

    def replace(self, **changes: Any) -> Config:
        """A copy with some fields changed; nothing is derived or checked again."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """All fields but secrets as plain JSON values, in the order of the groups."""
        plain = {spec.name: _plain(getattr(self, spec.name)) for spec in FLAG_SPECS.values() if not spec.info.secret}
        return {**plain, "carried": _plain(self.carried)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """The inverse of `to_dict`; unknown names and wrong types are refused."""
        fields: dict[str, Any] = {}
        unknown: list[str] = []
        for name, value in values.items():
            if name == "carried":
                fields[name] = dict(value)
            elif name in FLAG_SPECS:
                fields[name] = None if value is None else coerce(FLAG_SPECS[name], value, where=name)
            else:
                unknown.append(_unknown(name))
        if unknown:
            raise UserError(one_message(unknown, "keys"))
        return cls(**fields)


def _unknown(name: str) -> str:
    """The sentence for a keyword that is no field, with the same help as a flag of that name gets."""
    sentence = refusal(name.replace("_", "-")) or foreign_hint(name, shown=name)
    if sentence is not None:
        return in_python(sentence)
    return f"unknown config key {name}{did_you_mean(name, FLAG_SPECS)}"


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


FLAG_SPECS: dict[str, FlagSpec] = {spec.name: spec for group in GROUPS for spec in specs_of_group(group)}
"""Every flag by field name, in the order of the groups."""


# Configs in files: TOML or YAML with the names of the flags.
#
# Invariant: `load_config(save_config(config)) == config`, carried flags included.

RESOLVED = "# The resolved config of a run; "
"""How a config begins that a run wrote."""


def read_config_file(path: str, *, what: str = "--config") -> dict[str, Any]:
    """The top-level mapping of a TOML (.toml) or YAML (.yaml, .yml, .json) file."""
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
    """Write the config as YAML that `--config` reads back to the identical object."""
    text = yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True, width=120)
    Path(path).write_text(f"{RESOLVED}start it again with --config {path}\n{text}", encoding="utf-8")


def load_config(path: str | Path) -> Config:
    """The config that `save_config` wrote."""
    return Config.from_dict(read_config_file(str(path), what="config file"))
