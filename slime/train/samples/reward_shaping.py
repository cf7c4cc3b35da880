"""From the rewards of samples to those that advantages are made of.

Invariant: groups go by `group_index` and count what `--advantage-population` says, whatever their sizes; a sample that
is excluded gets zero and has no say; every reward that leaves here is a finite number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from slime.algorithms.estimators import TOKEN, RewardGroups
from slime.algorithms.rewards import overlong_penalties
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
    """(raw rewards for the logs, rewards the advantages are made of)."""
    if config.custom_reward_post_process_path is not None:
        return _custom(config, config.custom_reward_post_process_path, samples, excluded)
    rewards = _rewards_of(config, samples, excluded)
    notes = [sample.metadata for sample in samples]
    raw = [
        float(note["raw_reward"]) if "raw_reward" in note else value for note, value in zip(notes, rewards, strict=True)
    ]
    before_penalty = rewards
    if config.overlong_buffer_len:
        rewards = _less_overlong(config, samples, rewards)
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
    """For each response token what its turn earned, at the last token of the turn that is trained on.

    Only for estimators with a reward at every token; the others go by the reward of the whole. Where that is nothing
    but the sum of the turns' it is taken off again at the end, where the estimators put it. None where no turn has a
    reward, or a function of the user makes the rewards.
    """
    own_shaping = config.custom_reward_post_process_path is not None
    if estimator_of(config).level != TOKEN or own_shaping:
        return None
    turns = [[] if skip else _turns_of(sample) for sample, skip in zip(samples, excluded, strict=True)]
    if not any(turns):
        return None
    sums = [sample.metadata.get("turn_rewards_sum") for sample in samples]
    return [
        _placed(own, mask, total if total is not None and total == sample.reward and not skip else 0.0)
        for own, mask, total, sample, skip in zip(turns, masks, sums, samples, excluded, strict=True)
    ]


def _turns_of(sample: Sample) -> list[tuple[int, int, float]]:
    try:
        return turn_rewards(sample)
    except BadSample as error:
        raise UserError(f"sample {sample.index}: {error}") from error


def _placed(turns: Sequence[tuple[int, int, float]], mask: np.ndarray, at_the_end: float) -> np.ndarray:
    placed = np.zeros(len(mask), dtype=np.float32)
    actions = np.flatnonzero(mask)
    if not len(actions):
        return placed
    for _, stop, reward in turns:
        before = int(np.searchsorted(actions, stop))
        if before:  # a turn of which nothing is trained on is paid to the one before
            placed[actions[before - 1]] += reward
    placed[actions[-1]] -= at_the_end
    return placed


def _rewards_of(config: Config, samples: Sequence[Sample], excluded: Sequence[bool]) -> list[float]:
    given = [sample.reward for sample in samples]
    if set(map(type, given)) == {float} and np.isfinite(np.array(given)).all():
        return given  # type: ignore[return-value]  # as they nearly always are
    return [_reward_of(config, sample, skip) for sample, skip in zip(samples, excluded, strict=True)]


def _reward_of(config: Config, sample: Sample, excluded: bool) -> float:
    if excluded and not isinstance(sample.reward, int | float):
        return math.nan
    if sample.reward is None:
        if config.use_opd:  # the teacher may be the only judge
            return 0.0
        raise UserError(f"sample {sample.index} has no reward: its reward function must set one or fail the sample")
    reward = float(sample.reward_number(config))
    if not math.isfinite(reward) and not excluded:
        path = keep_bad_sample(config.output_dir, None, sample.index, sample.to_dict())
        raise UserError(
            f"sample {sample.index} has reward {reward}: rewards must be finite (see its reward function); it is in "
            f"{path}"
        )
    return reward


def _less_overlong(config: Config, samples: Sequence[Sample], rewards: Sequence[float]) -> list[float]:
    assert config.rollout_max_response_len is not None, "checked when the flags were"
    penalties = overlong_penalties(
        [sample.response_length for sample in samples],
        max_len=config.rollout_max_response_len,
        buffer_len=config.overlong_buffer_len,
        penalty=config.overlong_penalty,
    )
    return [reward + penalty for reward, penalty in zip(rewards, penalties, strict=True)]


def _custom(
    config: Config, path: str, samples: Sequence[Sample], excluded: Sequence[bool]
) -> tuple[list[float], list[float]]:
    hook = load_function(path, what="--custom-reward-post-process-path", params=("args", "samples"))
    raw, rewards = hook(plugin_args(config), list(samples))
    if len(raw) != len(samples) or len(rewards) != len(samples):
        raise UserError(f"{path} returned {len(raw)} and {len(rewards)} rewards for {len(samples)} samples")
    for sample, reward, skip in zip(samples, rewards, excluded, strict=True):
        if not skip and not math.isfinite(reward):
            kept = keep_bad_sample(config.output_dir, None, sample.index, sample.to_dict())
            raise UserError(
                f"{path} returned reward {reward} for sample {sample.index}: rewards must be finite; it is in {kept}"
            )
    return [float(value) for value in raw], [float(value) for value in rewards]
