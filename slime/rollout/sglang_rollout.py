"""The default rollout function, and its helpers under the import path that slime plugins use.

Called from synchronous code; the work happens on the event loop of the runtime that belongs to `args`.
"""

from __future__ import annotations

from typing import Any

from slime.config import Config
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.batch import generate_batch
from slime.rollout.evaluate import evaluate
from slime.rollout.generate import generate
from slime.rollout.group import generate_and_rm, generate_and_rm_group
from slime.rollout.runtime import runtime_for
from slime.rollout.state import GenerateState as _GenerateState
from slime.utils.http_utils import get_model_url

__all__ = [
    "GenerateState",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "get_model_url",
]


def generate_rollout(
    args: Config, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """One training rollout, or with `evaluation` one pass over the evaluation datasets."""
    runtime = runtime_for(args)
    if evaluation:
        return runtime.run(evaluate(runtime.args, rollout_id))
    return runtime.run(generate_batch(runtime.args, rollout_id, data_source))


def GenerateState(args: object) -> _GenerateState:
    """The rollout state that belongs to `args`: the same object on every call."""
    return runtime_for(args).state
