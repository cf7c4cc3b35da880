"""A rollout function that only adds to the default one."""

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.sglang_rollout import generate_rollout as base


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    output = base(args, rollout_id, data_source, evaluation=evaluation)
    if evaluation:
        assert isinstance(output, RolloutFnEvalOutput)
        return output
    assert isinstance(output, RolloutFnTrainOutput)
    output.metrics["rollout/longest"] = max(s.response_length for group in output.samples for s in group)
    return output
