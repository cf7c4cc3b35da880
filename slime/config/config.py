"""The one configuration object: flat, frozen, typed; each field is one flag.

Invariant: `Config.from_dict(config.to_dict()) == config`, and everything that is not a field lives in `carried`,
from where attribute access finds it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slime.config.foreign_flags import foreign_hint, in_python
from slime.config.groups.agent import AgentFlags
from slime.config.groups.algorithm import AlgorithmFlags
from slime.config.groups.asynchronous import AsyncFlags
from slime.config.groups.checkpoint import CheckpointFlags
from slime.config.groups.cluster import ClusterFlags
from slime.config.groups.correction import CorrectionFlags
from slime.config.groups.critic import CriticFlags
from slime.config.groups.data import DataFlags
from slime.config.groups.debug import DebugFlags
from slime.config.groups.distillation import DistillationFlags
from slime.config.groups.engine import EngineFlags
from slime.config.groups.evaluation import EvalFlags
from slime.config.groups.live import LiveFlags
from slime.config.groups.logs import LoggingFlags
from slime.config.groups.lora import LoraFlags
from slime.config.groups.megatron import MegatronFlags
from slime.config.groups.model import ModelFlags
from slime.config.groups.optimizer import OptimizerFlags
from slime.config.groups.reward import RewardFlags
from slime.config.groups.rollout import RolloutFlags
from slime.config.groups.upstream import UpstreamFlags
from slime.config.groups.weights import WeightFlags
from slime.config.not_yet import refusal
from slime.config.spec import FlagSpec, specs_of_group
from slime.config.suggest import did_you_mean, one_message
from slime.config.values import coerce
from slime.errors import UserError
from slime.plugins.args import Overlay

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
    """What plugins see and write (`slime.config.plugin_args`): shared by all copies, read by no part of the run."""

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
