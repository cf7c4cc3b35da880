"""Groups and their staleness, failures as typed outcomes, the owners of samples, output types of rollout functions.

A failed sample is an outcome with a cause, not a reward of 0, and it does not end the run. A rollout function is
`f(args, rollout_id, data_source, evaluation=False)`; `call_rollout_fn` calls it and wraps what older plugins return
(bare samples, or a bare evaluation dict) in the output types.

Invariant: a sample marked as failed here has status FAILED, a cause, no reward and `remove_sample`, so training leaves
it out of group statistics and gradients. The run stops (`RolloutFailed`) only if every sample of a rollout failed.

The staleness of a sample in rollout r is r minus the oldest weight version among its trained tokens. Weights of version
r are trained on rollout r, so a synchronous run has staleness 0 throughout. Versions that are not numbers (from
external engines) are ignored.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slime.config import Config
from slime.data.buffer import JournaledSource
from slime.data.sample import Sample
from slime.data.source import RolloutDataSource
from slime.engine.http.client import EngineError
from slime.errors import RunFailed
from slime.storage.json_types import JsonObject

logger = logging.getLogger(__name__)


class RolloutFailed(RunFailed):
    """A rollout has no sample that can be trained on or reported."""


class GivenUp(Exception):
    """The rollout is complete and ended a running generate function; its sample starts over from the prompt."""


class Leaked(Exception):
    """A user function raised SystemExit or CancelledError, which would have ended the program or its task."""


async def call_contained(call: Callable[[], object], who: str) -> Any:
    """Call a plain or async user function, and turn its own SystemExit or CancelledError into `Leaked`.

    A cancellation of the surrounding task is passed on.
    """
    try:
        result = call()
        return await result if inspect.isawaitable(result) else result
    except SystemExit as error:
        raise Leaked(f"{who} called sys.exit({error.code!r})") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Leaked(f"{who} let a CancelledError out although its task was not cancelled") from error


class FailureLog:
    """Counts failures, and logs the traceback of each distinct failure (stage, type, place in the code) once."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str, str, int]] = set()
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    def record(self, stage: str, error: Exception) -> str:
        """Count the error and return the cause as it is written into samples."""
        if isinstance(error, EngineError):
            stage = "engine"
        cause = f"{stage}: {type(error).__name__}: {error}"
        file, line = "", 0
        traceback = error.__traceback__
        if traceback is not None:
            while traceback.tb_next is not None:
                traceback = traceback.tb_next
            file, line = traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        with self._lock:
            self.counts[stage] += 1
            key = (stage, type(error).__name__, file, line)
            new = key not in self._seen
            self._seen.add(key)
        if new:
            logger.error("a sample failed (%s); further failures of this kind are only counted", cause, exc_info=error)
        return cause


def detached_copy(sample: Sample) -> Sample:
    """Return a copy of the sample that a function left running in its thread cannot write into."""
    twin = copy.copy(sample)
    twin.metadata = dict(sample.metadata)
    return twin


def mark_failed(samples: Sequence[Sample], cause: str) -> None:
    """Mark samples as failed; what was generated is kept for inspection."""
    for sample in samples:
        sample.status = Sample.Status.FAILED
        sample.failure = cause
        sample.reward = None
        sample.remove_sample = True


def forget_response(sample: Sample, prompt: list[int]) -> None:
    """Remove a response that a failed function may have left incomplete; `prompt` are the tokens before it."""
    sample.tokens = list(prompt)
    sample.response = ""
    sample.response_length = 0
    sample.loss_mask = None
    sample.rollout_log_probs = None
    sample.teacher_log_probs = None
    sample.rollout_top_p_token_ids = None
    sample.rollout_top_p_token_offsets = None
    sample.rollout_routed_experts = None
    sample.weight_versions = []
    sample.version_spans = []


def prompt_tokens(sample: Sample) -> list[int]:
    """Return the tokens before the response; empty while the prompt is a text."""
    ids: list[int] = sample.token_array()[: max(0, sample.prompt_length)].tolist()
    return ids


def reset_to_prompt(sample: Sample) -> None:
    """Reset a sample to its prompt: its tokens are those before the response."""
    forget_response(sample, prompt_tokens(sample))
    sample.status = Sample.Status.PENDING
    sample.reward = None
    sample.failure = None
    sample.remove_sample = False


def refuse_all_failed(samples: Sequence[Sample], what: str) -> None:
    """Raise `RolloutFailed` if the sequence is empty or all samples failed."""
    if not samples:
        raise RolloutFailed(f"{what}: there are no samples; the data source handed out nothing")
    if all(sample.status is Sample.Status.FAILED for sample in samples):
        raise RolloutFailed(f"{what}: all {len(samples)} samples failed; the first one: {samples[0].failure}")


Produced = Sample | list[Sample]
"""Result of one dispatched sample: a sample, or several training samples (fan-out)."""

Group = list[Produced]
"""All results of one prompt."""

Nested = Sample | Iterable["Nested"]
"""A sample, group or batch, nested to any depth."""

EvalResult = dict[str, Any]
"""Result of one dataset: the aligned lists `rewards`, `truncated` and `samples`, and the list `failed`."""


SourceGroups = list[Any]
"""Groups of a data source, each a list of samples and fan-outs."""


class PromptSource(Protocol):
    """Data source as a rollout uses it."""

    def get_samples(self, num_samples: int, /) -> SourceGroups:
        """Hand out the next groups."""

    def add_samples(self, samples: SourceGroups, /) -> None:
        """Take groups back."""


@dataclass
class RolloutFnTrainOutput:
    """Groups to train on, and metrics under their full names (``rollout/...``, ``perf/...``)."""

    samples: list[Group]
    metrics: JsonObject | None = None


@dataclass
class RolloutFnEvalOutput:
    """``{dataset: {"rewards": [...], "truncated": [...], "samples": [...]}}`` (aligned lists), and metrics."""

    data: dict[str, EvalResult]
    metrics: JsonObject | None = None


def call_rollout_fn(
    fn: Callable[..., Any], *args: Any, evaluation: bool, **kwargs: Any
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Call a rollout function with `(args, rollout_id, data_source)` and wrap a bare result.

    The default data sources get the id of the rollout that reads from them.
    """
    if not evaluation and len(args) > 2:
        set_source_rollout_id(data_source=args[2], rollout_id=args[1])
    output = fn(*args, evaluation=evaluation, **kwargs)
    if isinstance(output, RolloutFnTrainOutput | RolloutFnEvalOutput):
        return output
    return RolloutFnEvalOutput(data=output) if evaluation else RolloutFnTrainOutput(samples=output)


def set_source_rollout_id(data_source: object, rollout_id: int) -> None:
    """Set the rollout id in a default data source, for the filters of its buffer."""
    source = data_source.source if isinstance(data_source, JournaledSource) else data_source
    if isinstance(source, RolloutDataSource):
        source.rollout_id = rollout_id


def leaves(produced: Nested) -> Iterator[Sample]:
    """Iterate in order over all samples of a sample, group or batch of any nesting depth."""
    if isinstance(produced, Sample):
        yield produced
    else:
        for part in produced:
            yield from leaves(part)


def group_order(group: Group) -> int:
    """Return the smallest sample index of a group, by which the groups of a batch are sorted."""
    return min((sample.index for sample in leaves(group) if sample.index is not None), default=-1)


def sampled_tokens(group: Group) -> int:
    """Return the number of trainable tokens that engines sampled for a group."""
    return sum(sample.effective_response_length for sample in leaves(group))


def group_version(group: Group) -> int | None:
    """Return the oldest weight version that sampled a trained token of the group; None if no token has a version."""
    versions = [sample.oldest_weight_version for sample in leaves(group)]
    return min((version for version in versions if version is not None), default=None)


def is_stale(args: Config, group: Group, rollout_id: int) -> bool:
    """Return whether a group exceeds `--max-weight-staleness` in this rollout."""
    return is_too_old(args, group_version(group), rollout_id)


def is_too_old(args: Config, version: int | None, rollout_id: int) -> bool:
    """Return whether a weight version exceeds `--max-weight-staleness` in this rollout."""
    bound = args.max_weight_staleness
    return bound is not None and version is not None and rollout_id - version > bound


def prompts_of(group: Group) -> Group | None:
    """Reset a group to its prompts for regeneration; None if a member is a fan-out, whose prompt no longer exists."""
    if not all(isinstance(member, Sample) for member in group):
        return None
    for sample in leaves(group):
        reset_to_prompt(sample)
        sample.metadata.pop("start_rollout_id", None)
    return group


OwnerKey = tuple[bool, str | None, int | None, int | None]
"""Key of a dispatched sample: is in an evaluation, session id, group index, index."""


class SampleTaken(ValueError):
    """A function returned a sample that belongs to another dispatched sample."""


class SampleOwners:
    """Maps each live `Sample` object to the one dispatched sample that it belongs to."""

    def __init__(self) -> None:
        self._owners: dict[int, tuple[weakref.ref[Sample], OwnerKey]] = {}

    def owner(self, sample: Sample) -> OwnerKey | None:
        """Return the key of the dispatched sample that the object belongs to."""
        known = self._owners.get(id(sample))
        return None if known is None else known[1]

    def take(self, sample: Sample, owner: OwnerKey) -> None:
        """Assign the object to this dispatched sample."""
        place = id(sample)

        def forget(ref: weakref.ref[Sample]) -> None:
            if place in self._owners and self._owners[place][0] is ref:
                del self._owners[place]

        self._owners[place] = weakref.ref(sample, forget), owner
