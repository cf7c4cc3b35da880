"""What a function of the user hands back, as the rest of the room may trust it.

Invariants: whose sample it is (group, index, rollout, session, row of the journal) is given by whoever dispatched it
and never read from what comes back: a new `Sample`, or a list of them, takes the place of the one that was handed out.
All samples that one dispatched sample became share a rollout id and are different objects, and no object comes of two
dispatched samples (`Claims`). One whose fields do not fit together is a failure with its cause: it is never journaled
as data, so no restart can stumble over it.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any

from slime.data.sample import Sample
from slime.data.validation import BadSample, Bounds, check_sample, mend
from slime.rollout.failures import FailureLog, forget_response, mark_failed, prompt_tokens
from slime.rollout.gate import evaluating
from slime.rollout.types import Produced, leaves

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
