"""From `Sample`s to the arrays that training needs.

Invariant: position i of every list speaks about sample i, in the order the rollout handed them over. A sample that
failed or was aborted unscored stays in the lists (it is counted) with an all-zero loss mask, a normalised reward of
zero and no say in its group's statistics.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime.algorithms.rewards import normalize_group_rewards
from slime.config import Config
from slime.data.sample import Sample
from slime.errors import UserError
from slime.plugins import load_function


@dataclass
class TrainBatch:
    """Per-sample lists; `rollout_log_probs` is None unless every trainable sample has them."""

    tokens: list[np.ndarray]
    response_lengths: list[int]
    loss_masks: list[np.ndarray]
    rewards: list[float]
    raw_reward: list[float]
    truncated: list[int]
    excluded: list[bool]
    sample_indices: list[int]
    group_indices: list[int]
    rollout_ids: list[int]
    rollout_mask_sums: list[int]
    rollout_log_probs: list[np.ndarray] | None
    train_metadata: list[dict[str, Any] | None]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def total_lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.tokens]

    def trainable(self, position: int) -> bool:
        """Whether there is any response token to compute a log-prob for."""
        return self.response_lengths[position] > 0

    def select(self, positions: Sequence[int]) -> TrainBatch:
        lists: dict[str, Any] = {
            field.name: None if (column := getattr(self, field.name)) is None else [column[i] for i in positions]
            for field in dataclasses.fields(self)
        }
        return TrainBatch(**lists)

    def to_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainBatch:
        return cls(**values)


def flatten_samples(nested: Iterable[Any]) -> list[Sample]:
    """Groups, and groups of fanned-out rollouts, to one list."""
    flat: list[Sample] = []
    for item in nested:
        if isinstance(item, list | tuple):
            flat.extend(flatten_samples(item))
        else:
            flat.append(item)
    return flat


def make_train_batch(config: Config, samples: Sequence[Sample]) -> TrainBatch:
    excluded = [_is_excluded(sample) for sample in samples]
    raw_reward, rewards = _post_process_rewards(config, samples, excluded)
    rollout_ids = _complete_ids([sample.rollout_id for sample in samples])
    masks = [_loss_mask(sample, skip) for sample, skip in zip(samples, excluded, strict=True)]
    mask_sums: dict[int, int] = {}
    for rollout_id, mask in zip(rollout_ids, masks, strict=True):
        mask_sums[rollout_id] = mask_sums.get(rollout_id, 0) + int(mask.sum())
    return TrainBatch(
        tokens=[np.asarray(sample.tokens, dtype=np.int64) for sample in samples],
        response_lengths=[sample.response_length for sample in samples],
        loss_masks=masks,
        rewards=[0.0 if skip else float(reward) for reward, skip in zip(rewards, excluded, strict=True)],
        raw_reward=raw_reward,
        truncated=[int(sample.status is Sample.Status.TRUNCATED) for sample in samples],
        excluded=excluded,
        sample_indices=_complete_ids([sample.index for sample in samples]),
        group_indices=_complete_ids([sample.group_index for sample in samples]),
        rollout_ids=rollout_ids,
        rollout_mask_sums=[mask_sums[rollout_id] for rollout_id in rollout_ids],
        rollout_log_probs=_rollout_log_probs(samples),
        train_metadata=[sample.train_metadata for sample in samples],
    )


def batch_metrics(batch: TrainBatch, *, with_rewards: bool = True) -> dict[str, float]:
    """Means of the per-sample numbers under `rollout/`; excluded samples are counted, not averaged in."""
    kept = [i for i in range(len(batch)) if not batch.excluded[i]]
    columns: dict[str, Sequence[float]] = {
        "truncated": batch.truncated,
        "response_lengths": batch.response_lengths,
        "total_lengths": batch.total_lengths,
    }
    if with_rewards:
        columns |= {"rewards": batch.rewards, "raw_reward": batch.raw_reward}
    metrics = {f"rollout/{name}": float(np.mean([column[i] for i in kept])) for name, column in columns.items() if kept}
    metrics["rollout/excluded_samples"] = float(len(batch) - len(kept))
    return metrics


def _is_excluded(sample: Sample) -> bool:
    if sample.status is Sample.Status.FAILED:
        return True
    return sample.reward is None and (sample.status is Sample.Status.ABORTED or sample.response_length == 0)


def _loss_mask(sample: Sample, excluded: bool) -> np.ndarray:
    length = sample.response_length
    if not 0 <= length <= len(sample.tokens):
        raise UserError(f"sample {sample.index} says response_length {length} but has {len(sample.tokens)} tokens")
    if length and length == len(sample.tokens):
        raise UserError(f"sample {sample.index} has no prompt token before its response: give it at least one")
    if excluded or sample.remove_sample:
        return np.zeros(length, dtype=np.float32)
    if sample.loss_mask is None:
        return np.ones(length, dtype=np.float32)
    if len(sample.loss_mask) != length:
        raise UserError(f"sample {sample.index} has {len(sample.loss_mask)} loss-mask entries for {length} tokens")
    return np.asarray(sample.loss_mask, dtype=np.float32)


def _complete_ids(ids: Sequence[int | None]) -> list[int]:
    """Samples without an id get a fresh one each, so that they share nothing with others."""
    unused = max((value for value in ids if value is not None), default=-1) + 1
    complete: list[int] = []
    for value in ids:
        complete.append(unused if value is None else value)
        unused += value is None
    return complete


def _rollout_log_probs(samples: Sequence[Sample]) -> list[np.ndarray] | None:
    if any(sample.rollout_log_probs is None and sample.response_length for sample in samples):
        return None
    columns = [np.asarray(sample.rollout_log_probs or [], dtype=np.float32) for sample in samples]
    for sample, column in zip(samples, columns, strict=True):
        if len(column) != sample.response_length:
            raise UserError(
                f"sample {sample.index} has {len(column)} rollout log-probs for {sample.response_length} tokens"
            )
    return columns


def _reward_of(config: Config, sample: Sample, excluded: bool) -> float:
    if excluded and sample.reward is None:
        return math.nan
    if sample.reward is None:
        raise UserError(f"sample {sample.index} has no reward: its reward function must set one or fail the sample")
    return float(sample.get_reward_value(config))


def _post_process_rewards(
    config: Config, samples: Sequence[Sample], excluded: Sequence[bool]
) -> tuple[list[float], list[float]]:
    """(raw rewards for the logs, rewards the advantages are made of)."""
    if config.loss_type == "sft_loss":
        zeros = [0.0] * len(samples)
        return zeros, zeros
    if config.custom_reward_post_process_path is not None:
        path = config.custom_reward_post_process_path
        hook = load_function(path, what="--custom-reward-post-process-path", params=("args", "samples"))
        raw, rewards = hook(config, list(samples))
        if len(raw) != len(samples) or len(rewards) != len(samples):
            raise UserError(f"{path} returned {len(raw)} and {len(rewards)} rewards for {len(samples)} samples")
        return [float(value) for value in raw], [float(value) for value in rewards]
    rewards = [_reward_of(config, sample, skip) for sample, skip in zip(samples, excluded, strict=True)]
    raw = [float(sample.metadata.get("raw_reward", value)) for sample, value in zip(samples, rewards, strict=True)]
    if config.disable_rewards_normalization:
        return raw, rewards
    normalized = normalize_group_rewards(
        rewards,
        _complete_ids([sample.group_index for sample in samples]),
        divide_by_std=not config.disable_grpo_std_normalization,
        excluded=excluded,
    )
    return raw, normalized
