"""What a function of the user hands back, as the rest of the room may trust it.

Invariants: whose sample it is (group, index, rollout, session, row of the journal) is given by whoever dispatched it
and never read from what comes back: a new `Sample`, or a list of them, takes the place of the one that was handed out.
All samples that one dispatched sample became share a rollout id and are different objects, and no object comes of two
dispatched samples (`Claims`). One whose fields do not fit together is a failure with its cause: it is never journaled
as data, so no restart can stumble over it.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slime.data.buffer import JournaledSource
from slime.data.sample import Sample
from slime.data.source import RolloutDataSource
from slime.data.validation import BadSample, Bounds, check_sample, mend
from slime.engine.http.client import EngineError
from slime.errors import RunFailed
from slime.rollout.gate import evaluating

# A failed sample is an outcome with a cause, never a reward of 0 and never the end of the run.
#
# Invariant: a sample marked here has status FAILED, a cause, no reward and `remove_sample`, so training leaves it out
# of group statistics and gradients. Only when every sample of a rollout failed does the run stop (`RolloutFailed`).

logger = logging.getLogger(__name__)


class RolloutFailed(RunFailed):
    """Nothing of a rollout can be trained on or reported."""


class GivenUp(Exception):
    """The rollout has what it needs, and ended what a generate function was doing: its sample starts over."""


class Leaked(Exception):
    """A function of the user let out what would have ended the program, or its task."""


async def contained(call: Callable[[], Any], who: str) -> Any:
    """What a function of the user gives, plain or async; an exit or a cancellation of its own is an error like others.

    Whoever cancels the task that this runs in is obeyed.
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
        raise Leaked(f"{who} let a CancelledError out that nobody here asked for") from error


class FailureLog:
    """Counts failures and logs the traceback of each distinct one (stage, type, place in the code) once."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str, str, int]] = set()
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    def record(self, stage: str, error: Exception) -> str:
        """Count the error; returns the cause as it is written into samples."""
        if isinstance(error, EngineError):
            stage = "engine"
        cause = f"{stage}: {type(error).__name__}: {error}"
        with self._lock:
            self.counts[stage] += 1
            key = (stage, type(error).__name__, *_place(error))
            new = key not in self._seen
            self._seen.add(key)
        if new:
            logger.error("a sample failed (%s); further failures of this kind are only counted", cause, exc_info=error)
        return cause


def out_of_reach(sample: Sample) -> Sample:
    """The sample as an object of its own: a function that was left behind in its thread writes into the other one."""
    twin = copy.copy(sample)
    twin.metadata = dict(sample.metadata)
    return twin


def mark_failed(samples: Sequence[Sample], cause: str) -> None:
    """Turn samples into failures; what was generated is kept for inspection."""
    for sample in samples:
        sample.status = Sample.Status.FAILED
        sample.failure = cause
        sample.reward = None
        sample.remove_sample = True


def forget_response(sample: Sample, prompt: list[int]) -> None:
    """Drop a response that a failed function may have left half written; `prompt` are the tokens before it."""
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
    """The tokens before the response; none, as long as the prompt is a text."""
    ids: list[int] = sample.token_array()[: max(0, sample.prompt_length)].tolist()
    return ids


def start_over(sample: Sample) -> None:
    """Make a sample a fresh prompt: its tokens are those before the response."""
    forget_response(sample, prompt_tokens(sample))
    sample.status = Sample.Status.PENDING
    sample.reward = None
    sample.failure = None
    sample.remove_sample = False


def refuse_all_failed(samples: Sequence[Sample], what: str) -> None:
    """Raise `RolloutFailed` when there is no sample, or none that did not fail."""
    if not samples:
        raise RolloutFailed(f"{what}: there are no samples; the data source handed out nothing")
    if all(sample.status is Sample.Status.FAILED for sample in samples):
        raise RolloutFailed(f"{what}: all {len(samples)} samples failed; the first one: {samples[0].failure}")


def _place(error: Exception) -> tuple[str, int]:
    traceback = error.__traceback__
    if traceback is None:
        return "", 0
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback.tb_frame.f_code.co_filename, traceback.tb_lineno


# What a rollout function returns, and the one way to call it.
#
# A rollout function is `f(args, rollout_id, data_source, evaluation=False)`. It may return the types below or, as
# older plugins do, the bare samples or the bare evaluation dict; `call_rollout_fn` hands out the types in every case.

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


_GIVEN = ("group_index", "index", "rollout_id", "session_id", "journal_id")
_INHERITED = (
    "prompt",
    "label",
    "metadata",
    "apply_chat_template_kwargs",
    "multimodal_inputs",
    "generate_function_path",
    "custom_rm_path",
    "task",
)
"""What a new sample has from the one that it came of, unless it has something of its own there."""


_STATUSES = {status.value for status in Sample.Status}
_ENDED_WELL = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)


class SampleTaken(ValueError):
    """A function returned a sample that belongs to another dispatched sample."""


class Claims:
    """Which dispatched sample each living `Sample` object belongs to: one, for as long as the object lives."""

    def __init__(self) -> None:
        self._owners: dict[int, tuple[weakref.ref[Sample], tuple[Any, ...]]] = {}

    def owner(self, sample: Sample) -> tuple[Any, ...] | None:
        """The key of the dispatched sample that the object belongs to."""
        known = self._owners.get(id(sample))
        return None if known is None else known[1]

    def take(self, sample: Sample, owner: tuple[Any, ...]) -> None:
        """The object belongs to this dispatched sample from here on."""
        place = id(sample)

        def forget(ref: weakref.ref[Sample]) -> None:
            if place in self._owners and self._owners[place][0] is ref:
                del self._owners[place]

        self._owners[place] = weakref.ref(sample, forget), owner


class Origin:
    """A sample as it was dispatched: what everything that comes of it belongs to."""

    def __init__(self, sample: Sample, claims: Claims | None = None) -> None:
        self._sample = sample
        self._claims = Claims() if claims is None else claims
        self._key = (evaluating.get(), sample.session_id, sample.group_index, sample.index)
        self._claims.take(sample, self._key)
        self._given = {name: getattr(sample, name) for name in _GIVEN}
        self._inherited = {name: getattr(sample, name) for name in _INHERITED}
        self._prompt = _prompt_of(sample)

    def claimed(self, result: Any, who: str) -> Produced:
        """What `who` returned, if it may: a sample, or several; all of them belong to this origin from here on."""
        if isinstance(result, Sample):
            self.claim(result, who)
            return result
        if not isinstance(result, list) or not result or not all(isinstance(item, Sample) for item in result):
            raise TypeError(f"{who} must return a Sample or a list of them, not {result!r:.200}")
        if len(result) > 1 and self._given["rollout_id"] is None:
            self._given["rollout_id"] = self._given["index"]
        siblings = _distinct(result)
        for sibling in siblings:
            self._refuse_taken(sibling, who)
        for sibling in siblings:
            self.claim(sibling, who)
        return siblings

    def claim(self, sample: Sample, who: str, siblings: Sequence[Sample] = ()) -> None:
        """Make a sample one that came of this origin; a status that was written as its value becomes a status.

        A `SampleTaken` leaves a sample of another origin, or one of the `siblings`, as it is.
        """
        self._refuse_taken(sample, who, siblings)
        self._claims.take(sample, self._key)
        if isinstance(sample.status, str) and sample.status in _STATUSES:
            sample.status = Sample.Status(sample.status)
        for name, value in self._given.items():
            setattr(sample, name, value)
        if sample is self._sample:
            return
        for name, value in self._inherited.items():
            if not getattr(sample, name):
                setattr(sample, name, copy.deepcopy(value))

    def _refuse_taken(self, sample: Sample, who: str, siblings: Sequence[Sample] = ()) -> None:
        owner = self._claims.owner(sample)
        if any(sample is sibling for sibling in siblings):
            already = "another sample of its fan-out"
        elif owner is not None and owner != self._key:
            already = f"sample {owner[-1]} of group {owner[-2]}"
        else:
            return
        raise SampleTaken(
            f"{who} returned for sample {self._given['index']} an object that is already {already}: return the sample "
            "it was given, or a copy.deepcopy of a result that it keeps"
        )

    def again(self, given_up: Sample) -> Sample:
        """What to call the function with once more: what it gave up, or the dispatched sample, from its prompt.

        The latter where a prompt of its own took the place of the one it was given: it would not know that one.
        """
        if given_up.prompt == self._inherited["prompt"]:
            return given_up
        for name, value in {**self._given, **self._inherited}.items():
            setattr(self._sample, name, value)
        self.forget_response(self._sample)
        self._sample.status, self._sample.reward = Sample.Status.ABORTED, None
        return self._sample

    def forget_response(self, sample: Sample) -> None:
        """What came of a sample becomes the prompt again that was dispatched."""
        mend(sample)
        forget_response(sample, self._prompt)

    def settle(self, produced: Produced, stage: str, log: FailureLog, bounds: Bounds) -> None:
        """Samples that `stage` has left in no state to go on in fail; one that was given up has a cause."""
        for sample in leaves([produced]):
            cause = sample.failure
            try:
                check_sample(sample, bounds)
            except BadSample as error:
                self.forget_response(sample)
                cause = cause or log.record(stage, error)
                sample.status = Sample.Status.FAILED
            if sample.status is Sample.Status.FAILED:
                mark_failed([sample], str(cause or f"{stage}: the {stage} function gave this sample up"))
            elif sample.status is Sample.Status.PENDING:
                sample.status = Sample.Status.COMPLETED  # nobody works on it any more


def is_settled(sample: Sample, bounds: Bounds) -> bool:
    """Whether a sample has ended well, so that there is nothing about it to settle."""
    if sample.status not in _ENDED_WELL:
        return False
    try:
        check_sample(sample, bounds)
    except BadSample:
        return False
    return True


def _prompt_of(sample: Sample) -> list[int]:
    try:
        check_sample(sample)
    except BadSample:
        return []
    return prompt_tokens(sample)


def _distinct(samples: Sequence[Sample]) -> list[Sample]:
    """The same samples, each an object of its own."""
    seen: set[int] = set()
    found = []
    for sample in samples:
        found.append(copy.deepcopy(sample) if id(sample) in seen else sample)
        seen.add(id(sample))
    return found
