"""Rewards onto samples: what the hub says, or a failure with its cause."""

from __future__ import annotations

from collections.abc import Sequence

from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.failures import mark_failed
from slime.rollout.runtime import RolloutRuntime


async def score_one(runtime: RolloutRuntime, sample: Sample) -> None:
    """Give a sample its reward, unless it has one or must not get one (failed, aborted)."""
    if not _wants_reward(sample):
        return
    try:
        sample.reward = await runtime.hub.score(sample)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a reward function raises is this sample's outcome
        mark_failed([sample], runtime.failures.record("reward", error))


async def score_together(runtime: RolloutRuntime, samples: Sequence[Sample]) -> None:
    """Give samples their rewards in one call; when it raises, all of them fail."""
    unscored = [sample for sample in samples if _wants_reward(sample)]
    if not unscored:
        return
    try:
        rewards = await runtime.hub.score_group(unscored)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a reward function raises is these samples' outcome
        mark_failed(unscored, runtime.failures.record("reward", error))
        return
    for sample, reward in zip(unscored, rewards, strict=True):
        sample.reward = reward


def _wants_reward(sample: Sample) -> bool:
    return sample.reward is None and sample.status not in (Sample.Status.FAILED, Sample.Status.ABORTED)
