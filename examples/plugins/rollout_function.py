"""A whole rollout step of one's own: the usual one, with a second try when all rewards are the same.

--rollout-function-path examples/plugins/rollout_function.py
"""

from slime.rollout.base_types import RolloutFnTrainOutput, leaves
from slime.rollout.sglang_rollout import generate_rollout


def rollout_function(args, rollout_id, data_source, evaluation=False):
    """The groups to train on, and metrics; with `evaluation` the evaluation's results."""
    output = generate_rollout(args, rollout_id, data_source, evaluation=evaluation)
    if evaluation:
        return output
    rewards = {sample.reward for sample in leaves(output.samples) if sample.reward is not None}
    if len(rewards) == 1:
        output = generate_rollout(args, rollout_id, data_source)
    return RolloutFnTrainOutput(output.samples, {**output.metrics, "rollout/retried": float(len(rewards) == 1)})
