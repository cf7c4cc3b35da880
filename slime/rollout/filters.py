"""Applies the user's filters to finished groups, with a limit on consecutive rejections.

A dynamic sampling filter is `f(args, samples) -> DynamicFilterOutput | bool`; `samples` are those of one finished group
that did not fail, fan-outs flattened. The two filters below keep a group when its rewards differ, std > 1e-6 (sample
standard deviation, float64). A group whose rewards are all equal has advantage 0 everywhere and gives no gradient
(DAPO, section 3.2).

Invariant: every group given to `GroupJudge.keeps` is either kept and ready for the trainers, or counted as dropped with
its reason and its tokens. A filter that keeps dropping ends the rollout (`RolloutFailed`) instead of reading the data
forever. Dropped groups stay in memory until the rollout is full only if `--rollout-all-samples-process-path` or the
data source (`observe_samples`) needs them.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from slime.data.buffer import JournaledSource
from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.metrics import RepetitionCache
from slime.rollout.outcomes import Group, Produced, RolloutFailed, group_order, leaves, sampled_tokens
from slime.rollout.runtime import RolloutRuntime, find_runtime

MIN_REWARD_STD = 1e-6
MAX_DROPS_PER_GROUP = 100
"""Groups dropped in a row, per group of the batch, after which the rollout fails."""


@dataclass
class DynamicFilterOutput:
    """Result of a dynamic filter: whether to keep a group, and the reason if not.

    With `keep_when_insufficient` a rejected group is used after all when the batch would otherwise need more prompts.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False
    note_drop: Callable[[], None] | None = field(default=None, repr=False, compare=False)
    """Records the group as dropped in the journal; set for rollout functions of users."""


def run_dynamic_filter(fn: Callable[..., object] | None, *args: Any, **kwargs: object) -> DynamicFilterOutput:
    """Call the filter and return its result as a `DynamicFilterOutput`; without a filter every group is kept."""
    output = True if fn is None else fn(*args, **kwargs)
    if isinstance(output, DynamicFilterOutput):
        return output
    if isinstance(output, bool | np.bool_):
        return DynamicFilterOutput(keep=bool(output))
    path = args[0].dynamic_sampling_filter_path if args else None
    raise UserError(
        f"--dynamic-sampling-filter-path {path} returned {output!r:.80}: it must return a bool or a DynamicFilterOutput"
    )


def call_dynamic_filter(fn: Callable[..., object] | None, *args: Any, **kwargs: object) -> DynamicFilterOutput:
    """Call a dynamic filter for a rollout function of the user, and record a rejected group as dropped in the journal.

    A group with `keep_when_insufficient` is recorded as dropped later, by `should_drop_dynamic_filter_output`.
    """
    verdict = run_dynamic_filter(fn, *args, **kwargs)
    runtime = find_runtime(args[0]) if len(args) > 1 else None
    if verdict.keep or runtime is None or runtime.journal is None:
        return verdict
    verdict.note_drop = partial(runtime.journal.drop, [args[1]])
    if not verdict.keep_when_insufficient:
        verdict.note_drop()
    return verdict


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, remaining_batch_size: int = 0, target_data_size: int = -1
) -> bool:
    """Return whether to discard a group: the filter rejects it, and the batch does not need it to be filled."""
    is_dropped = not output.keep and not (output.keep_when_insufficient and remaining_batch_size <= target_data_size)
    if is_dropped and output.note_drop is not None:
        output.note_drop()
    return is_dropped


class MetricGatherer:
    """Counts the groups that dynamic filters dropped, for rollout functions of users."""

    def __init__(self) -> None:
        self._reasons: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        """Count a dropped group under its reason; a group without a reason is not counted."""
        if reason:
            self._reasons[reason] += 1

    def collect(self) -> dict[str, float]:
        """Return the counts as metrics."""
        return drop_metrics(self._reasons)


def drop_metrics(reasons: Counter[str]) -> dict[str, float]:
    """Return the number of dropped groups per reason as metrics."""
    return {f"rollout/dynamic_filter/drop_{reason}": float(count) for reason, count in reasons.items()}


def check_reward_nonzero_std(
    args: argparse.Namespace, samples: Sequence[Produced], **kwargs: object
) -> DynamicFilterOutput:
    """Drop groups whose rewards (including those of fan-outs) are all equal; the reason is ``zero_std_<reward>``."""
    rewards = [float(sample.reward_number(args)) for sample in leaves(samples) if sample.reward is not None]
    if not rewards:
        return DynamicFilterOutput(keep=False, reason="no_reward")
    std = np.std(np.asarray(rewards, dtype=np.float64), ddof=1) if len(rewards) > 1 else 0.0
    if std > MIN_REWARD_STD:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(
    args: argparse.Namespace, samples: Sequence[Produced], **kwargs: object
) -> DynamicFilterOutput:
    """Like `check_reward_nonzero_std`, but keep such a group when the batch would otherwise need more prompts."""
    output = check_reward_nonzero_std(args, samples)
    output.keep_when_insufficient = True
    return output


class GroupFilter:
    """Applies the dynamic filter during one rollout, and counts the groups it drops."""

    def __init__(self, runtime: RolloutRuntime, what: str, data_source: object = None) -> None:
        self._args = runtime.args
        self._journal = data_source if isinstance(data_source, JournaledSource) else runtime.journal
        self._pulse = runtime.pulse
        self._what = what
        path = runtime.args.dynamic_sampling_filter_path
        self._filter = (
            None
            if path is None
            else runtime.function(path, flag="--dynamic-sampling-filter-path", params=("args", "samples"))
        )
        self._kept = 0
        self._dropped_in_a_row = 0
        self._runtime = runtime
        self._holds = runtime.args.rollout_all_samples_process_path is not None
        self._first_failure: str | None = None
        self._has_succeeded = False
        self._dropped_samples = self.dropped_groups = self.dropped_tokens = 0
        self.removed_groups = 0
        self.dropped: list[Group] = []
        """Dropped groups; collected only for `--rollout-all-samples-process-path`."""
        self.reasons: Counter[str] = Counter()
        self.repetitions = RepetitionCache()

    async def verdict(self, group: Group) -> DynamicFilterOutput:
        """Run the filter, which may block, on a group and return its result."""
        alive = [sample for sample in leaves(group) if sample.status is not Sample.Status.FAILED]
        if self._filter is None:
            return DynamicFilterOutput(keep=True)
        if not alive:
            return DynamicFilterOutput(keep=False, reason="failed")
        who = f"--dynamic-sampling-filter-path {self._args.dynamic_sampling_filter_path}"
        return await self._runtime.off_loop(run_dynamic_filter, who, self._filter, self._runtime.plugin_args, alive)

    def keeps(self, group: Group, verdict: DynamicFilterOutput, *, insufficient: bool) -> bool:
        """Return whether to train on a group, and count it; `insufficient`: without it more prompts are needed.

        The arrays of a kept group are put into memory that trainers read while other groups are still sampled.
        """
        if verdict.keep or (verdict.keep_when_insufficient and insufficient):
            self._kept += 1
            self._dropped_in_a_row = 0
            keep = self._runtime.keep
            for sample in leaves(group):
                if sample.status is not Sample.Status.FAILED:
                    self.repetitions.note(sample)
                    if keep is not None:
                        sample.keep_with(keep)
            return True
        self.reasons[verdict.reason or "unnamed"] += 1
        if self._holds:
            self.dropped.append(group)
        if self._journal is not None:
            self._journal.drop([group])
        self._pulse.subtract_discarded(len(group))
        self._dropped_in_a_row += 1
        self.dropped_groups += 1
        self.dropped_tokens += sampled_tokens(group)
        for sample in leaves(group):
            self._dropped_samples += 1
            if sample.status is not Sample.Status.FAILED:
                self._has_succeeded = True
            elif self._first_failure is None:
                self._first_failure = sample.failure
        batch = self._args.rollout_batch_size
        if self._kept == 0 and self.dropped_groups >= batch and not self._has_succeeded:
            raise RolloutFailed(
                f"{self._what}: all {self._dropped_samples} samples failed; the first one: {self._first_failure}"
            )
        if self._dropped_in_a_row >= MAX_DROPS_PER_GROUP * batch:
            reasons = ", ".join(f"{reason}: {count}" for reason, count in self.reasons.most_common())
            raise RolloutFailed(
                f"{self._what}: --dynamic-sampling-filter-path {self._args.dynamic_sampling_filter_path} dropped "
                f"{self._dropped_in_a_row} groups in a row ({reasons}): use prompts that the model solves sometimes, "
                "or slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback"
            )
        return False

    def count_removed(self, before: Sequence[Group], groups: list[Group], who: str) -> None:
        """Count the groups that a filter removed from a batch; as dropped groups they are not used after a restart."""
        groups[:] = [group for group in groups if any(True for _ in leaves(group))]
        left = {id(sample) for sample in leaves(groups)}
        removed = [group for group in before if left.isdisjoint(id(sample) for sample in leaves(group))]
        if not groups:
            raise RolloutFailed(f"{self._what}: {who} removed all {len(before)} groups: keep some to train on")
        self.removed_groups += len(removed)
        if self._journal is not None:
            for group in removed:
                self._journal.drop([group])

    def metrics(self) -> dict[str, float]:
        """Return the number of dropped groups per reason, and their tokens."""
        return drop_metrics(self.reasons) | {"rollout/dropped_tokens": float(self.dropped_tokens)}

    def removed(self) -> dict[str, float]:
        """Return the number of groups that `--rollout-sample-filter-path` removed, if that flag is set."""
        if self._args.rollout_sample_filter_path is None:
            return {}
        return {"rollout/removed_groups": float(self.removed_groups)}


async def call_batch_plugins(
    runtime: RolloutRuntime, groups: list[Group], judge: GroupFilter, data_source: object
) -> None:
    """Call the batch filter and the processor of all finished groups; both may block."""
    args = runtime.args
    everything = sorted([*groups, *judge.dropped], key=group_order)
    before = [list(group) for group in groups]
    if args.rollout_sample_filter_path is not None:
        sample_filter = runtime.function(
            args.rollout_sample_filter_path, flag="--rollout-sample-filter-path", params=("args", "groups")
        )
        who = f"--rollout-sample-filter-path {args.rollout_sample_filter_path}"
        await runtime.off_loop(sample_filter, who, runtime.plugin_args, groups)
        judge.count_removed(before, groups, who)
    if args.rollout_all_samples_process_path is not None:
        process = runtime.function(
            args.rollout_all_samples_process_path,
            flag="--rollout-all-samples-process-path",
            params=("args", "all_groups", "data_source"),
        )
        who = f"--rollout-all-samples-process-path {args.rollout_all_samples_process_path}"
        await runtime.off_loop(process, who, runtime.plugin_args, everything, data_source)
