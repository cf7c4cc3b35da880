"""Return types of rollout functions, under the import path of slime plugins."""

from slime.rollout.outcomes import (
    Group,
    Produced,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    call_rollout_fn,
    leaves,
)

__all__ = ["Group", "Produced", "RolloutFnEvalOutput", "RolloutFnTrainOutput", "call_rollout_fn", "leaves"]
