"""The registry of advantage estimators, from which `--advantage-estimator` chooses.

Invariant: no other code lists estimators or branches on their names; flags, checks, plans and the trainer read the
entries. To add an estimator, write its function and its entry here. Importing this file imports no torch, because flags
are parsed without it: functions import what they compute with.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

RESPONSE, TOKEN = "response", "token"
PPO, GSPO, CISPO = "ppo", "gspo", "cispo"
POLICY_LOSSES = (PPO, GSPO, CISPO)
NONZERO_STD_FILTER = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"


@dataclass(frozen=True)
class EstimatorInputs:
    """Inputs of an estimator; lists have one entry per sample, tensors one number per response token."""

    rewards: Sequence[float]
    masks: Sequence[Tensor]
    kl: Sequence[Tensor] | None
    values: Sequence[Tensor] | None
    placed: Sequence[Tensor] | None
    """Rewards of single turns, at tokens of these turns."""
    kl_coef: float
    gamma: float
    lambd: float


@dataclass(frozen=True)
class RewardGroups:
    """The groups within which rewards are compared (`slime.algorithms.rewards`)."""

    group_indices: Sequence[Hashable]
    rollout_ids: Sequence[Hashable] | None
    excluded: Sequence[bool] | None
    population: str
    divide_by_std: bool
    before_penalty: Sequence[float] | None = None
    """Rewards before the penalty for length, from which the population `auto` chooses; None: the rewards themselves."""


Advantages = tuple[Sequence["Tensor"], Sequence["Tensor"]]


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


def _subtract_group_mean(rewards: Sequence[float], groups: RewardGroups) -> list[float]:
    from slime.algorithms.rewards import normalize_group_rewards

    return normalize_group_rewards(
        rewards,
        groups.group_indices,
        groups.rollout_ids,
        population=groups.population,
        divide_by_std=groups.divide_by_std,
        excluded=groups.excluded,
        before_penalty=groups.before_penalty,
    )


def _subtract_mean_of_others(rewards: Sequence[float], groups: RewardGroups) -> list[float]:
    from slime.algorithms.advantages import leave_one_out_rewards

    return leave_one_out_rewards(
        rewards,
        groups.group_indices,
        groups.rollout_ids,
        population=groups.population,
        excluded=groups.excluded,
        before_penalty=groups.before_penalty,
    )


def _reward_at_each_token(given: EstimatorInputs) -> Advantages:
    from slime.algorithms.advantages import grpo_advantages

    advantages = grpo_advantages(given.rewards, [len(mask) for mask in given.masks])
    return advantages, list(advantages)


def _reinforce_plus_plus(given: EstimatorInputs) -> Advantages:
    from slime.algorithms.advantages import reinforce_plus_plus_advantages

    advantages = reinforce_plus_plus_advantages(
        given.rewards, given.kl, given.masks, kl_coef=given.kl_coef, gamma=given.gamma, placed=given.placed
    )
    return advantages, list(advantages)


def _reinforce_plus_plus_baseline(given: EstimatorInputs) -> Advantages:
    from slime.algorithms.advantages import reinforce_plus_plus_baseline_advantages

    advantages = reinforce_plus_plus_baseline_advantages(given.rewards, given.kl, given.masks, kl_coef=given.kl_coef)
    return advantages, list(advantages)


def _ppo(given: EstimatorInputs) -> Advantages:
    from slime.algorithms.advantages import ppo_advantages

    assert given.values is not None, "an estimator with a critic has its values"
    return ppo_advantages(
        given.rewards,
        given.values,
        given.kl,
        given.masks,
        kl_coef=given.kl_coef,
        gamma=given.gamma,
        lambd=given.lambd,
        placed=given.placed,
    )


_ALL = (
    Estimator("grpo", RESPONSE, _reward_at_each_token, _subtract_group_mean, divides_by_std=True),
    Estimator("gspo", RESPONSE, _reward_at_each_token, _subtract_group_mean, divides_by_std=True, policy_loss=GSPO),
    Estimator("cispo", RESPONSE, _reward_at_each_token, _subtract_group_mean, divides_by_std=True, policy_loss=CISPO),
    Estimator("reinforce_plus_plus", TOKEN, _reinforce_plus_plus, kl_in_reward=True, needs_whitening=True),
    Estimator(
        "reinforce_plus_plus_baseline",
        RESPONSE,
        _reinforce_plus_plus_baseline,
        _subtract_group_mean,
        kl_in_reward=True,
        needs_whitening=True,
    ),
    Estimator("ppo", TOKEN, _ppo, kl_in_reward=True, has_critic=True),
    Estimator("rloo", RESPONSE, _reward_at_each_token, _subtract_mean_of_others, needs_siblings=True),
    Estimator(
        "dr_grpo",
        RESPONSE,
        _reward_at_each_token,
        _subtract_group_mean,
        presets={"disable_grpo_std_normalization": True, "loss_aggregation": "constant"},
    ),
    Estimator(
        "dapo",
        RESPONSE,
        _reward_at_each_token,
        _subtract_group_mean,
        divides_by_std=True,
        presets={
            "eps_clip_high": 0.28,
            "loss_aggregation": "token_mean",
            "dynamic_sampling_filter_path": NONZERO_STD_FILTER,
        },
    ),
)
ESTIMATORS: dict[str, Estimator] = {one.name: one for one in _ALL}
