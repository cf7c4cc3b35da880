"""Makes a training batch with the user's conversion function.

Invariant: missing columns are filled in as if every sample were alone in its group and rollout; unknown columns are
passed to custom losses and hooks under their own names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slime.config import Config
from slime.config.plugins import load_function
from slime.config.plugins.view import plugin_args
from slime.data.routed_experts import narrow_expert_ids
from slime.data.sample import Sample
from slime.errors import UserError
from slime.train.samples.batch import TrainBatch

FLAG = "--custom-convert-samples-to-train-data-path"
REQUIRED = ("tokens", "response_lengths", "rewards")


def make_custom_batch(config: Config, samples: Sequence[Sample]) -> TrainBatch:
    """Call the conversion function and check its result."""
    path = config.custom_convert_samples_to_train_data_path
    assert path is not None
    hook = load_function(path, what=FLAG, params=("args", "samples"))
    made = hook(plugin_args(config), list(samples))
    if not isinstance(made, Mapping):
        raise UserError(f"{FLAG}: {path} returned a {type(made).__name__}; it must return a dict of lists")
    for name in REQUIRED:
        if name not in made:
            raise UserError(f"{FLAG}: {path} returned no {name!r}; it must return at least {', '.join(REQUIRED)}")
    count = len(made["tokens"])
    for name, column in made.items():
        if len(column) != count:
            raise UserError(f"{FLAG}: {path} returned {len(column)} entries of {name!r} and {count} of 'tokens'")
    batch = _batch_from_columns({name: list(column) for name, column in made.items()}, count)
    if config.use_rollout_routing_replay and batch.rollout_routed_experts is None:
        raise UserError(f"{FLAG}: {path} returned no 'rollout_routed_experts': --use-rollout-routing-replay needs them")
    return batch


def _batch_from_columns(made: dict[str, list[Any]], count: int) -> TrainBatch:
    """Convert the columns and fill in missing ones."""
    tokens = [np.asarray(ids, dtype=np.int64) for ids in made.pop("tokens")]
    lengths = [int(length) for length in made.pop("response_lengths")]
    rewards = [float(reward) for reward in made.pop("rewards")]
    masks = made.pop("loss_masks", None) or [np.ones(length) for length in lengths]
    loss_masks = [np.asarray(mask, dtype=np.float32) for mask in masks]
    rollout_ids = [int(i) for i in made.pop("rollout_ids", range(count))]
    sums: dict[int, int] = {}
    for rollout_id, mask in zip(rollout_ids, loss_masks, strict=True):
        sums[rollout_id] = sums.get(rollout_id, 0) + int(mask.sum())
    experts = made.pop("rollout_routed_experts", None)
    made.pop("rollout_mask_sums", None)  # computed here
    made.pop("total_lengths", None)
    return TrainBatch(
        tokens=tokens,
        response_lengths=lengths,
        loss_masks=loss_masks,
        rewards=rewards,
        raw_reward=[float(reward) for reward in made.pop("raw_reward", rewards)],
        truncated=[int(flag) for flag in made.pop("truncated", [0] * count)],
        excluded=[bool(flag) for flag in made.pop("excluded", [False] * count)],
        sample_indices=[int(i) for i in made.pop("sample_indices", range(count))],
        group_indices=[int(i) for i in made.pop("group_indices", range(count))],
        rollout_ids=rollout_ids,
        rollout_mask_sums=[sums[rollout_id] for rollout_id in rollout_ids],
        rollout_log_probs=_floats(made.pop("rollout_log_probs", None)),
        teacher_log_probs=_floats(made.pop("teacher_log_probs", None)),
        train_metadata=made.pop("train_metadata", [None] * count),
        rollout_routed_experts=None if experts is None else [narrow_expert_ids(np.asarray(rows)) for rows in experts],
        extra=made,
    )


def _floats(column: list[object] | None) -> list[np.ndarray] | None:
    return None if column is None else [np.asarray(values, dtype=np.float32) for values in column]
