"""The registry of advantage estimators, from which `--advantage-estimator` chooses.

Invariant: no other code lists estimators or branches on their names; flags, checks, plans and the trainer read the
entries. To add an estimator, write its function (`advantages.py`, `rewards.py`) and its entry here. Importing this
file imports no torch, because flags are parsed without it: functions are imported when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.algorithms.advantages import Advantages, EstimatorInputs
    from slime.algorithms.rewards import RewardGroups

RESPONSE, TOKEN = "response", "token"
PPO, GSPO, CISPO = "ppo", "gspo", "cispo"
POLICY_LOSSES = (PPO, GSPO, CISPO)
NONZERO_STD_FILTER = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"


@dataclass(frozen=True)
class Estimator:
    """An entry of the registry: the functions and properties of an advantage estimator."""

    name: str
    level: str
    """RESPONSE: one reward per response, the same advantage at each of its tokens; TOKEN: rewards at single tokens."""
    advantages: Callable[[EstimatorInputs], Advantages]
    """Computes (advantages, returns) from the shaped rewards."""
    baseline: Callable[[Sequence[float], RewardGroups], list[float]] | None = None
    """Compares rewards with those of their group; None: rewards are used unchanged."""
    divides_by_std: bool = False
    policy_loss: str = PPO
    """The default of `--policy-loss` with this estimator."""
    needs_siblings: bool = False
    """True if a group of one is refused, as there is nothing to compare with."""
    kl_in_reward: bool = False
    needs_whitening: bool = False
    has_critic: bool = False
    presets: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Defaults of flags with this estimator."""

    @property
    def group_relative(self) -> bool:
        """True if rewards are compared within their group, so that a group of one has advantage 0."""
        return self.baseline is not None


def estimator_names(condition: Callable[[Estimator], bool]) -> str:
    """Join the names of the estimators that satisfy a condition, for messages."""
    return ", ".join(name for name, one in ESTIMATORS.items() if condition(one))


def _imported(module: str, name: str) -> Callable[..., Any]:
    """A function of `slime.algorithms` whose module is imported by its first call."""

    def call(*given: object) -> Any:
        return getattr(import_module(f"slime.algorithms.{module}"), name)(*given)

    return call


_group_mean = _imported("rewards", "normalize_group_rewards")
_mean_of_others = _imported("rewards", "leave_one_out_rewards")
_reward_at_each_token = _imported("advantages", "grpo_advantages")
_reinforce_plus_plus = _imported("advantages", "reinforce_plus_plus_advantages")
_reinforce_plus_plus_baseline = _imported("advantages", "reinforce_plus_plus_baseline_advantages")
_ppo = _imported("advantages", "ppo_advantages")

_ALL = (
    Estimator("grpo", RESPONSE, _reward_at_each_token, _group_mean, divides_by_std=True),
    Estimator("gspo", RESPONSE, _reward_at_each_token, _group_mean, divides_by_std=True, policy_loss=GSPO),
    Estimator("cispo", RESPONSE, _reward_at_each_token, _group_mean, divides_by_std=True, policy_loss=CISPO),
    Estimator("reinforce_plus_plus", TOKEN, _reinforce_plus_plus, kl_in_reward=True, needs_whitening=True),
    Estimator(
        "reinforce_plus_plus_baseline",
        RESPONSE,
        _reinforce_plus_plus_baseline,
        _group_mean,
        kl_in_reward=True,
        needs_whitening=True,
    ),
    Estimator("ppo", TOKEN, _ppo, kl_in_reward=True, has_critic=True),
    Estimator("rloo", RESPONSE, _reward_at_each_token, _mean_of_others, needs_siblings=True),
    Estimator(
        "dr_grpo",
        RESPONSE,
        _reward_at_each_token,
        _group_mean,
        presets={"disable_grpo_std_normalization": True, "loss_aggregation": "constant"},
    ),
    Estimator(
        "dapo",
        RESPONSE,
        _reward_at_each_token,
        _group_mean,
        divides_by_std=True,
        presets={
            "eps_clip_high": 0.28,
            "loss_aggregation": "token_mean",
            "dynamic_sampling_filter_path": NONZERO_STD_FILTER,
        },
    ),
)
ESTIMATORS: dict[str, Estimator] = {one.name: one for one in _ALL}
