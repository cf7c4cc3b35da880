"""Which finished groups become training data: the user's filters, with an end to their patience.

A dynamic sampling filter is `f(args, samples) -> DynamicFilterOutput | bool`; `samples` are those of one finished group
that did not fail, fan-outs flattened. The two below keep a group when its rewards differ, std > 1e-6 (sample standard
deviation, float64): one with one reward throughout has advantage 0 everywhere and teaches nothing (DAPO, section 3.2).

Invariant: every group given to `GroupJudge.keeps` is either kept, ready for the trainers, or counted as dropped, with
its reason and its tokens; a filter that keeps dropping ends the rollout (`RolloutFailed`) instead of going through the
data forever. Dropped groups themselves are held only where `--rollout-all-samples-process-path` or the data source
(`observe_samples`) wants to see them, until the rollout is full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from slime.data.buffer import JournaledSource
from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.metrics import Repetitions
from slime.rollout.outcomes import Group, Produced, RolloutFailed, group_order, leaves, sampled_tokens
from slime.rollout.runtime import RolloutRuntime, find_runtime

LEAST_STD = 1e-6
MOST_DROPS_PER_GROUP = 100
"""Groups dropped in a row, for each group of the batch, until the rollout is given up."""


@dataclass
class DynamicFilterOutput:
    """Whether to keep a group, why not, and whether to keep it all the same before asking for more prompts."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False
    note_drop: Callable[[], None] | None = field(default=None, repr=False, compare=False)
    """Tells the journal that the group is not trained on; set for rollout functions of users."""


def verdict_of(fn: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """The filter's answer as the type above; no filter keeps everything."""
    output = True if fn is None else fn(*args, **kwargs)
    if isinstance(output, DynamicFilterOutput):
        return output
    if isinstance(output, bool | np.bool_):
        return DynamicFilterOutput(keep=bool(output))
    path = args[0].dynamic_sampling_filter_path if args else None
    raise UserError(
        f"--dynamic-sampling-filter-path {path} returned {output!r:.80}: it must return a bool or a DynamicFilterOutput"
    )


def call_dynamic_filter(fn: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """For rollout functions of users, which throw away what is not kept: the journal has it as dropped from here on.

    What may be kept all the same is so once `should_drop_dynamic_filter_output` has said it.
    """
    verdict = verdict_of(fn, *args, **kwargs)
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
    """Whether a group is thrown away: it is not kept, nor needed because without it prompts would run short."""
    is_dropped = not output.keep and not (output.keep_when_insufficient and remaining_batch_size <= target_data_size)
    if is_dropped and output.note_drop is not None:
        output.note_drop()
    return is_dropped


class MetricGatherer:
    """Counts what dynamic filters dropped, for rollout functions of users."""

    def __init__(self) -> None:
        self._reasons: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        """Count a group; one that was dropped for no reason is not named."""
        if reason:
            self._reasons[reason] += 1

    def collect(self) -> dict[str, float]:
        """The counts under their metrics' names."""
        return drop_metrics(self._reasons)


def drop_metrics(reasons: Counter[str]) -> dict[str, float]:
    """Dropped groups by reason."""
    return {f"rollout/dynamic_filter/drop_{reason}": float(count) for reason, count in reasons.items()}


def check_reward_nonzero_std(args: Any, samples: Sequence[Produced], **kwargs: Any) -> DynamicFilterOutput:
    """Drop groups whose rewards, those of fan-outs too, are all the same; the reason is ``zero_std_<reward>``."""
    rewards = [float(sample.reward_number(args)) for sample in leaves(samples) if sample.reward is not None]
    if not rewards:
        return DynamicFilterOutput(keep=False, reason="no_reward")
    std = np.std(np.asarray(rewards, dtype=np.float64), ddof=1) if len(rewards) > 1 else 0.0
    if std > LEAST_STD:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(
    args: Any, samples: Sequence[Produced], **kwargs: Any
) -> DynamicFilterOutput:
    """The same, but such a group is kept when the batch could not be filled without asking for more prompts."""
    output = check_reward_nonzero_std(args, samples)
    output.keep_when_insufficient = True
    return output


class GroupJudge:
    """The filter of one rollout and what it dropped."""

    def __init__(self, runtime: RolloutRuntime, what: str, data_source: Any = None) -> None:
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
        """Empty unless somebody wants to see them."""
        self.reasons: Counter[str] = Counter()
        self.repetitions = Repetitions()

    async def verdict(self, group: Group) -> DynamicFilterOutput:
        """What the filter, which may block, says about a group."""
        alive = [sample for sample in leaves(group) if sample.status is not Sample.Status.FAILED]
        if self._filter is None:
            return DynamicFilterOutput(keep=True)
        if not alive:
            return DynamicFilterOutput(keep=False, reason="failed")
        who = f"--dynamic-sampling-filter-path {self._args.dynamic_sampling_filter_path}"
        return await self._runtime.off_loop(verdict_of, who, self._filter, self._runtime.plugin_args, alive)

    def keeps(self, group: Group, verdict: DynamicFilterOutput, *, insufficient: bool) -> bool:
        """Whether to train on a group; `insufficient` says that without it more prompts would be needed."""
        if verdict.keep or (verdict.keep_when_insufficient and insufficient):
            self._kept += 1
            self._dropped_in_a_row = 0
            self._make_ready(group)
            return True
        self.reasons[verdict.reason or "unnamed"] += 1
        self._drop(group)
        self._refuse_endless_dropping()
        return False

    def note_removed(self, before: Sequence[Group], groups: list[Group], who: str) -> None:
        """Count the groups of a batch that a filter took out of it: no restart trains on them either."""
        groups[:] = [group for group in groups if any(True for _ in leaves(group))]
        left = {id(sample) for sample in leaves(groups)}
        removed = [group for group in before if left.isdisjoint(id(sample) for sample in leaves(group))]
        if not groups:
            raise RolloutFailed(f"{self._what}: {who} removed all {len(before)} groups: keep some to train on")
        self.removed_groups += len(removed)
        for group in removed if self._journal is not None else ():
            self._journal.drop([group])

    def _make_ready(self, group: Group) -> None:
        """Put what will be trained on where trainers read it, and look at it, while others are still sampled."""
        keep = self._runtime.keep
        for sample in leaves(group):
            if sample.status is not Sample.Status.FAILED:
                self.repetitions.note(sample)
                if keep is not None:
                    sample.keep_with(keep)

    def _drop(self, group: Group) -> None:
        if self._holds:
            self.dropped.append(group)
        if self._journal is not None:
            self._journal.drop([group])
        self._pulse.want_more(len(group))
        self._dropped_in_a_row += 1
        self.dropped_groups += 1
        self.dropped_tokens += sampled_tokens(group)
        for sample in leaves(group):
            self._dropped_samples += 1
            if sample.status is not Sample.Status.FAILED:
                self._has_succeeded = True
            elif self._first_failure is None:
                self._first_failure = sample.failure

    def metrics(self) -> dict[str, float]:
        """Dropped groups by reason, and their tokens."""
        return drop_metrics(self.reasons) | {"rollout/dropped_tokens": float(self.dropped_tokens)}

    def removed(self) -> dict[str, float]:
        """Groups that `--rollout-sample-filter-path` took out of the batch, where it is given."""
        if self._args.rollout_sample_filter_path is None:
            return {}
        return {"rollout/removed_groups": float(self.removed_groups)}

    def _refuse_endless_dropping(self) -> None:
        batch = self._args.rollout_batch_size
        if self._kept == 0 and self.dropped_groups >= batch and not self._has_succeeded:
            raise RolloutFailed(
                f"{self._what}: all {self._dropped_samples} samples failed; the first one: {self._first_failure}"
            )
        if self._dropped_in_a_row < MOST_DROPS_PER_GROUP * batch:
            return
        reasons = ", ".join(f"{reason}: {count}" for reason, count in self.reasons.most_common())
        raise RolloutFailed(
            f"{self._what}: --dynamic-sampling-filter-path {self._args.dynamic_sampling_filter_path} dropped "
            f"{self._dropped_in_a_row} groups in a row ({reasons}): use prompts that the model solves sometimes, or "
            "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback"
        )


async def call_plugins(runtime: RolloutRuntime, groups: list[Group], judge: GroupJudge, data_source: Any) -> None:
    """Filters over the batch, and whatever wants to see every finished group; they may block."""
    args = runtime.args
    everything = sorted([*groups, *judge.dropped], key=group_order)
    before = [list(group) for group in groups]
    if args.rollout_sample_filter_path is not None:
        sample_filter = runtime.function(
            args.rollout_sample_filter_path, flag="--rollout-sample-filter-path", params=("args", "groups")
        )
        who = f"--rollout-sample-filter-path {args.rollout_sample_filter_path}"
        await runtime.off_loop(sample_filter, who, runtime.plugin_args, groups)
        judge.note_removed(before, groups, who)
    if args.rollout_all_samples_process_path is not None:
        process = runtime.function(
            args.rollout_all_samples_process_path,
            flag="--rollout-all-samples-process-path",
            params=("args", "all_groups", "data_source"),
        )
        who = f"--rollout-all-samples-process-path {args.rollout_all_samples_process_path}"
        await runtime.off_loop(process, who, runtime.plugin_args, everything, data_source)
