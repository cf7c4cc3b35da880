"""P1's learnability filter: of each prompt the pass rate under the current policy decides whether it is trained on.

A group of `--n-samples-per-prompt` answers measures its prompt. `learnable` is the filter for a finished group: what is
never solved, or too often, is dropped before training. `LearnablePrompts` is the data source: it hears of all groups,
those dropped too, and does not ask again for a prompt that was found unlearnable until the next stage, in which group
size, length and policy are others and every prompt is measured anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.types import Sample

MEASURED, STAGE = "pass_rates", "stage"


def learnable(args: Any, samples: Sequence[Sample]) -> DynamicFilterOutput:
    """Keep a group if 0 < pass rate <= args.pass_rate_most; `samples` are those that did not fail."""
    rate = pass_rate(samples)
    if rate is None or rate == 0:
        return DynamicFilterOutput(keep=False, reason="never_solved")
    if rate > args.pass_rate_most:
        return DynamicFilterOutput(keep=False, reason="too_easy")
    return DynamicFilterOutput(keep=True)


def pass_rate(samples: Sequence[Sample]) -> float | None:
    """The share of right answers; None where none was scored."""
    rewards = [float(sample.reward) for sample in samples if sample.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None


class LearnablePrompts(RolloutDataSourceWithBuffer):
    """Prompts of --prompt-data, without those that this stage has measured as never solved or too easy."""

    def get_samples(self, num_samples: int) -> list[Any]:
        """What was put back, then prompts that may be learnable; when an epoch has none, all are measured again."""
        self._begin_stage()
        groups: list[Any] = self._get_samples_from_buffer(num_samples)
        skipped = 0
        while len(groups) < num_samples:
            (group,) = RolloutDataSource.get_samples(self, 1)
            rate = self.metadata[MEASURED].get(str(group[0].metadata["id"]))
            if rate is None or 0 < rate <= self.plugin_args.pass_rate_most:
                groups.append(group)
                skipped = 0
                continue
            skipped += 1
            if skipped == len(self):
                self.metadata[MEASURED] = {}
        return groups

    def load_state_dict(self, state: dict[str, Any], *, origin: str = "the saved data position") -> None:
        """Go on; a position of the stage before it gives only the place in the prompts."""
        super().load_state_dict(state, origin=origin)
        self._begin_stage()

    def observe_samples(self, rollout_id: int, groups: list[list[Sample]]) -> None:
        """Remember the pass rate of every finished group."""
        self._begin_stage()
        for group in groups:
            rate = pass_rate(group)
            if rate is not None:
                self.metadata[MEASURED][str(group[0].metadata["id"])] = rate

    def _begin_stage(self) -> None:
        """Every prompt is measured anew; groups left over have the size and the length of another stage."""
        if self.metadata.get(STAGE) != self.plugin_args.stage:
            self.metadata.update({STAGE: self.plugin_args.stage, MEASURED: {}})
            self.buffer.clear()
