"""Which finished groups become training data: `--dynamic-sampling-filter-path`, with an end to its patience.

Invariant: every group given to `keeps` is either kept or in `dropped`, with its reason counted; a filter that keeps
dropping ends the rollout (`RolloutFailed`) instead of going through the data forever.
"""

from __future__ import annotations

from collections import Counter

from slime.data.sample import Sample
from slime.rollout.base_types import Group, leaves
from slime.rollout.failures import RolloutFailed, refuse_all_failed
from slime.rollout.filter_hub.base_types import DynamicFilterOutput, call_dynamic_filter
from slime.rollout.runtime import RolloutRuntime

MOST_DROPS_PER_GROUP = 100
"""Groups dropped in a row, for each group of the batch, until the rollout is given up."""


class GroupJudge:
    """The filter of one rollout and what it dropped."""

    def __init__(self, runtime: RolloutRuntime, what: str) -> None:
        self._args = runtime.args
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
        self.dropped: list[Group] = []
        self.reasons: Counter[str] = Counter()

    def keeps(self, group: Group, *, insufficient: bool) -> bool:
        """Whether to train on a group; `insufficient` says that without it more prompts would be needed."""
        verdict = self._verdict(list(leaves(group)))
        if verdict.keep or (verdict.keep_when_insufficient and insufficient):
            self._kept += 1
            self._dropped_in_a_row = 0
            return True
        self.dropped.append(group)
        self._pulse.want_more(len(group))
        self.reasons[verdict.reason or "unnamed"] += 1
        self._dropped_in_a_row += 1
        self._refuse_endless_dropping()
        return False

    def metrics(self) -> dict[str, float]:
        """Dropped groups by reason."""
        return {f"rollout/dynamic_filter/drop_{reason}": float(count) for reason, count in self.reasons.items()}

    def _verdict(self, samples: list[Sample]) -> DynamicFilterOutput:
        alive = [sample for sample in samples if sample.status is not Sample.Status.FAILED]
        if self._filter is not None and not alive:
            return DynamicFilterOutput(keep=False, reason="failed")
        return call_dynamic_filter(self._filter, self._args, alive)

    def _refuse_endless_dropping(self) -> None:
        batch = self._args.rollout_batch_size
        if self._kept == 0 and len(self.dropped) >= batch:
            refuse_all_failed_groups(self.dropped, self._what)
        if self._dropped_in_a_row < MOST_DROPS_PER_GROUP * batch:
            return
        reasons = ", ".join(f"{reason}: {count}" for reason, count in self.reasons.most_common())
        raise RolloutFailed(
            f"{self._what}: --dynamic-sampling-filter-path {self._args.dynamic_sampling_filter_path} dropped "
            f"{self._dropped_in_a_row} groups in a row ({reasons}): use prompts that the model solves sometimes, or "
            "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback"
        )


def refuse_all_failed_groups(groups: list[Group], what: str) -> None:
    """Raise when no sample of any of these groups succeeded: an engine or a verifier is down."""
    samples = list(leaves(groups))
    if all(sample.status is Sample.Status.FAILED for sample in samples):
        refuse_all_failed(samples, what)
