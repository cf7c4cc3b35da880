"""Rewards onto samples: what the hub says, or a failure with its cause.

Invariant: a sample that leaves here has a reward, or failed, or was aborted; no reward that training would read is
infinite or no number at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from slime.config import Config
from slime.data.bad_sample import keep_bad_sample
from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.failures import mark_failed
from slime.rollout.runtime import RolloutRuntime


async def score_one(runtime: RolloutRuntime, sample: Sample) -> None:
    """Give a sample its reward, unless it has one or must not get one (failed, aborted)."""
    if not _wants_reward(sample):
        return
    if _needs_none(runtime, sample):
        sample.reward = 0.0
        return
    try:
        sample.reward = await runtime.hub.score(sample)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a reward function raises is this sample's outcome
        mark_failed([sample], runtime.failures.record("reward", error))


async def score_together(runtime: RolloutRuntime, samples: Sequence[Sample]) -> None:
    """Give samples their rewards in one call; when it raises, all of them fail."""
    for sample in samples:
        if _wants_reward(sample) and _needs_none(runtime, sample):
            sample.reward = 0.0
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


def refuse_bad_rewards(args: Config, samples: Sequence[Sample], *, evaluation: bool = False) -> None:
    """Raise a `UserError` for the first reward that is not a finite number, whoever gave it."""
    for sample in samples:
        if sample.reward is None:
            continue
        value = sample.get_reward_value(args, evaluation=evaluation)
        if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
            raise UserError(f"sample {sample.index}: {_giver(args, sample)} gave {value!r:.80}, which is no number")
        if not math.isfinite(float(value)):
            raise UserError(
                f"sample {sample.index}: {_giver(args, sample)} gave the reward {float(value)}, which would spoil "
                "every weight of the model: return a finite number, or raise to fail the sample; the sample is in "
                f"{keep_bad_sample(args.output_dir, None, sample.index, sample.to_dict())}"
            )


def _giver(args: Config, sample: Sample) -> str:
    """The function a sample's reward comes from, as far as flags and the sample say."""
    path = sample.custom_rm_path or args.custom_rm_path
    if path is not None:
        return f"the reward function {path}"
    rm_type = sample.metadata.get("rm_type") or args.rm_type
    if rm_type is not None:
        return f"the reward type {rm_type}"
    generate = sample.generate_function_path or args.custom_generate_function_path
    return f"the generate function {generate}" if generate is not None else "the reward function"


def _needs_none(runtime: RolloutRuntime, sample: Sample) -> bool:
    """Distillation without a verifier: the teacher is the only signal."""
    return runtime.state.rewardless and sample.custom_rm_path is None and not sample.metadata.get("rm_type")


def _wants_reward(sample: Sample) -> bool:
    return sample.reward is None and sample.status not in (Sample.Status.FAILED, Sample.Status.ABORTED)
