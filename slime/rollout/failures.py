"""A failed sample is an outcome with a cause, never a reward of 0 and never the end of the run.

Invariant: a sample marked here has status FAILED, a cause, no reward and `remove_sample`, so training leaves it out
of group statistics and gradients. Only when every sample of a rollout failed does the run stop (`RolloutFailed`).
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from slime.data.sample import Sample
from slime.engine.http.client import EngineError
from slime.errors import RunFailed

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
