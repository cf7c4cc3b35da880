"""The default rollout functions.

Called from synchronous code; the work happens on the event loop of the runtime that belongs to `args`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime.config import Config
from slime.rollout.batch import generate_batch
from slime.rollout.evaluate import evaluate
from slime.rollout.runtime import runtime_for
from slime.rollout.state import GenerateState as _GenerateState
from slime.rollout.types import Group, RolloutFnEvalOutput, RolloutFnTrainOutput


def generate_rollout(
    args: Config, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """One training rollout, or with `evaluation` one pass over the evaluation datasets."""
    runtime = runtime_for(args)
    if evaluation:
        return runtime.run(evaluate(args, rollout_id), whom=f"evaluation {rollout_id}")
    return runtime.run(generate_batch(args, rollout_id, data_source), whom=f"rollout {rollout_id}")


async def generate_rollout_async(
    args: Config, rollout_id: int, data_source: Any
) -> tuple[RolloutFnTrainOutput, list[Group]]:
    """One training rollout on the running loop, and the groups to put back into the data source.

    `data_source` is a data source, which gets its groups back at once, or only its `get_samples` method.
    """
    if not callable(data_source):
        return await generate_batch(args, rollout_id, data_source), []
    source = _GetSamples(data_source)
    return await generate_batch(args, rollout_id, source), source.put_back


async def eval_rollout(args: Config, rollout_id: int) -> tuple[RolloutFnEvalOutput, list[Group]]:
    """One pass over the evaluation datasets on the running loop; nothing to put back."""
    return await evaluate(args, rollout_id), []


class _GetSamples:
    """A data source of which only `get_samples` is known."""

    def __init__(self, get_samples: Callable[[int], list[Group]]) -> None:
        self.get_samples = get_samples
        self.put_back: list[Group] = []

    def add_samples(self, samples: list[Group]) -> None:
        self.put_back += samples


def GenerateState(args: object) -> _GenerateState:
    """The rollout state that belongs to `args`: the same object on every call."""
    return runtime_for(args).state
