"""What a rollout function returns, and the one way to call it.

A rollout function is `f(args, rollout_id, data_source, evaluation=False)`. It may return the types below or, as older
plugins do, the bare samples or the bare evaluation dict; `call_rollout_fn` hands out the types in every case.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from slime.data.buffer import JournaledSource
from slime.data.sample import Sample
from slime.data.source import RolloutDataSource

Produced = Sample | list[Sample]
"""What one dispatched sample became: itself, or several training samples (fan-out)."""

Group = list[Produced]
"""All that came of one prompt."""


@dataclass
class RolloutFnTrainOutput:
    """Groups to train on, and metrics under their full names (``rollout/...``, ``perf/...``)."""

    samples: list[Group]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """``{dataset: {"rewards": [...], "truncated": [...], "samples": [...]}}`` (aligned lists), and metrics."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def call_rollout_fn(
    fn: Callable[..., Any], *args: Any, evaluation: bool, **kwargs: Any
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Call a rollout function with `(args, rollout_id, data_source)` and wrap a bare result.

    The default data sources learn which rollout asks them.
    """
    if not evaluation and len(args) > 2:
        tell_rollout_id(data_source=args[2], rollout_id=args[1])
    output = fn(*args, evaluation=evaluation, **kwargs)
    if isinstance(output, RolloutFnTrainOutput | RolloutFnEvalOutput):
        return output
    return RolloutFnEvalOutput(data=output) if evaluation else RolloutFnTrainOutput(samples=output)


def tell_rollout_id(data_source: Any, rollout_id: int) -> None:
    """Let a default data source know which rollout asks it, for filters of its buffer."""
    source = data_source.source if isinstance(data_source, JournaledSource) else data_source
    if isinstance(source, RolloutDataSource):
        source.rollout_id = rollout_id


def leaves(produced: Any) -> Iterator[Sample]:
    """All samples of a sample, group or batch, however deeply nested, in order."""
    if isinstance(produced, Sample):
        yield produced
    else:
        for part in produced:
            yield from leaves(part)


def group_order(group: Group) -> int:
    """Groups of a batch are sorted by the first index in them."""
    return min((sample.index for sample in leaves(group) if sample.index is not None), default=-1)


def sampled_tokens(group: Group) -> int:
    """Tokens that engines sampled for a group, as far as they would be trained on."""
    return sum(sample.effective_response_length for sample in leaves(group))


def snapshot(member: Produced) -> Produced:
    """A copy of a member of a group, out of reach of generate functions, which may write into what they get."""
    return copy.deepcopy(member)
