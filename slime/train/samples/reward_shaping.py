"""Shapes the rewards of samples for the computation of advantages.

Invariant: groups are defined by `group_index` and count rollouts or samples according to `--advantage-population`, for
any group size; an excluded sample gets zero and does not affect others; every resulting reward is finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from slime.algorithms.estimators import TOKEN
from slime.algorithms.rewards import RewardGroups, overlong_penalties
from slime.config import Config
from slime.config.algorithm import estimator_of
from slime.config.plugins import load_function
from slime.config.plugins.view import plugin_args
from slime.data.sample import Sample
from slime.data.validation import BadSample, keep_bad_sample, turn_rewards
from slime.errors import UserError


def shape_rewards(
    config: Config,
    samples: Sequence[Sample],
    groups: Sequence[int],
    rollout_ids: Sequence[int],
    excluded: Sequence[bool],
) -> tuple[list[float], list[float]]:
    """Return the raw rewards for the logs, and the rewards that advantages are computed from."""
    if (path := config.custom_reward_post_process_path) is not None:
        hook = load_function(path, what="--custom-reward-post-process-path", params=("args", "samples"))
        unshaped, shaped = hook(plugin_args(config), list(samples))
        if len(unshaped) != len(samples) or len(shaped) != len(samples):
            raise UserError(f"{path} returned {len(unshaped)} and {len(shaped)} rewards for {len(samples)} samples")
        for sample, reward, skip in zip(samples, shaped, excluded, strict=True):
            if not skip and not math.isfinite(reward):
                kept = keep_bad_sample(config.output_dir, None, sample.index, sample.to_dict())
                raise UserError(
                    f"{path} returned reward {reward} for sample {sample.index}: rewards must be finite; see {kept}"
                )
        return [float(value) for value in unshaped], [float(value) for value in shaped]
    given = [sample.reward for sample in samples]
    if set(map(type, given)) == {float} and np.isfinite(np.array(given)).all():  # the common case
        rewards: list[float] = given  # type: ignore[assignment]
    else:
        rewards = [_checked_reward(config, sample, skip) for sample, skip in zip(samples, excluded, strict=True)]
    notes = [sample.metadata for sample in samples]
    raw = [
        float(note["raw_reward"]) if "raw_reward" in note else value for note, value in zip(notes, rewards, strict=True)
    ]
    before_penalty = rewards
    if config.overlong_buffer_len:
        assert config.rollout_max_response_len is not None, "the flags were checked"
        penalties = overlong_penalties(
            [sample.response_length for sample in samples],
            max_len=config.rollout_max_response_len,
            buffer_len=config.overlong_buffer_len,
            penalty=config.overlong_penalty,
        )
        rewards = [reward + penalty for reward, penalty in zip(rewards, penalties, strict=True)]
    if config.disable_rewards_normalization:
        return raw, rewards
    estimator = estimator_of(config)
    if estimator.baseline is None:
        return raw, rewards
    compared = RewardGroups(
        groups,
        rollout_ids,
        excluded,
        population=config.advantage_population,
        divide_by_std=estimator.divides_by_std and not config.disable_grpo_std_normalization,
        before_penalty=before_penalty,
    )
    return raw, estimator.baseline(rewards, compared)


def placed_turn_rewards(
    config: Config, samples: Sequence[Sample], masks: Sequence[np.ndarray], excluded: Sequence[bool]
) -> list[np.ndarray] | None:
    """Place each turn's reward at the last trained token of the turn; return a reward per response token.

    This applies only to estimators with a reward at every token; the others use the reward of the whole sample. If that
    is the sum of the turns' rewards, it is subtracted at the last token, where the estimators add it. Returns None if
    no turn has a reward, or if a user function shapes the rewards.
    """
    own_shaping = config.custom_reward_post_process_path is not None
    if estimator_of(config).level != TOKEN or own_shaping:
        return None
    turns: list[list[tuple[int, int, float]]] = []
    for sample, skip in zip(samples, excluded, strict=True):
        try:
            turns.append([] if skip else turn_rewards(sample))
        except BadSample as error:
            raise UserError(f"sample {sample.index}: {error}") from error
    if not any(turns):
        return None
    columns = []
    for own, mask, sample, skip in zip(turns, masks, samples, excluded, strict=True):
        placed = np.zeros(len(mask), dtype=np.float32)
        columns.append(placed)
        actions = np.flatnonzero(mask)
        if not len(actions):
            continue
        for _, stop, reward in own:
            before = int(np.searchsorted(actions, stop))
            if before:  # the reward of an untrained turn goes to the turn before it
                placed[actions[before - 1]] += reward
        total = sample.metadata.get("turn_rewards_sum")
        if total is not None and total == sample.reward and not skip:
            placed[actions[-1]] -= total
    return columns


def _checked_reward(config: Config, sample: Sample, excluded: bool) -> float:
    """Return the checked reward of a sample."""
    if excluded and not isinstance(sample.reward, int | float):
        return math.nan
    if sample.reward is None:
        if config.use_opd:  # the teacher may replace the reward
            return 0.0
        raise UserError(f"sample {sample.index} has no reward: its reward function must set one or fail the sample")
    reward = float(sample.reward_number(config))
    if not math.isfinite(reward) and not excluded:
        path = keep_bad_sample(config.output_dir, None, sample.index, sample.to_dict())
        raise UserError(
            f"sample {sample.index} has reward {reward}: its reward function must return a finite number; see {path}"
        )
    return reward
