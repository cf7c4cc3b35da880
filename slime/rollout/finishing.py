"""What a full batch goes through before it is trained on: its order, and the user's functions that see it whole."""

from __future__ import annotations

from typing import Any

from slime.rollout.base_types import Group, leaves
from slime.rollout.runtime import RolloutRuntime


def group_order(group: Group) -> int:
    """Groups of a batch are sorted by the first index in them."""
    return min((sample.index for sample in leaves(group) if sample.index is not None), default=-1)


def call_plugins(runtime: RolloutRuntime, groups: list[Group], everything: list[Group], data_source: Any) -> None:
    """Filters over the batch, and whatever wants to see every finished group."""
    args = runtime.args
    if args.rollout_sample_filter_path is not None:
        sample_filter = runtime.function(
            args.rollout_sample_filter_path, flag="--rollout-sample-filter-path", params=("args", "groups")
        )
        sample_filter(args, groups)
    if args.rollout_all_samples_process_path is not None:
        process = runtime.function(
            args.rollout_all_samples_process_path,
            flag="--rollout-all-samples-process-path",
            params=("args", "all_groups", "data_source"),
        )
        process(args, everything, data_source)
