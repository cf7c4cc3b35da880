"""What rollout functions return, under the path that slime plugins import it from."""

from slime.rollout.outcomes import (
    Group,
    Produced,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    call_rollout_fn,
    leaves,
)

__all__ = ["Group", "Produced", "RolloutFnEvalOutput", "RolloutFnTrainOutput", "call_rollout_fn", "leaves"]
