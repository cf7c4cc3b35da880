"""Supplies the training loop with numbered rollouts; the run modes differ only in this.

Invariant: every feed returns each rollout once, in the order of their numbers. An error during a rollout is raised by
the next `get`. After `close` no new rollout starts. A rollout that `RolloutMaker` returns is in the journal as a
complete batch, and after a crash the same batch is returned again.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from slime.cluster.watchdog import acting_as, background, raise_failures, waiting
from slime.config.algorithm import trains_on_log_probs
from slime.config.async_mode import is_async, may_train_on_stale_tokens
from slime.config.flags.rollout import ONE_STEP
from slime.data.buffer import JournaledSource
from slime.data.sample import Sample
from slime.data.source import observes
from slime.data.validation import BadSample, Bounds, check_sample
from slime.errors import UserError
from slime.rollout.debug_data import save_rollout
from slime.rollout.dispatcher import Dispatcher
from slime.rollout.metrics import rollout_metrics, staleness_metrics
from slime.rollout.outcomes import (
    RolloutFnTrainOutput,
    call_rollout_fn,
    leaves,
    refuse_all_failed,
)
from slime.rollout.runtime import RolloutRuntime
from slime.rollout.sample_pipeline import DispatchedSample
from slime.storage.json_types import JsonObject

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""Interval at which a wait for a rollout checks whether background tasks have died."""


@dataclass
class GeneratedRollout:
    """One rollout with its metrics; `is_logged` means that a user function has already logged them."""

    samples: list[Any]
    metrics: JsonObject
    is_logged: bool


class RolloutFeed(ABC):
    """Source of the rollouts of a run, in order."""

    @abstractmethod
    def get(self, rollout_id: int) -> GeneratedRollout:
        """Wait for the rollout with this number and return it."""

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Pause generation while the body updates weights or evaluates, if this mode requires a pause."""
        yield

    def weights_arrived(self, version: int) -> None:  # noqa: B027 (used only by fully asynchronous generation)
        """Note that all engines have this version of the weights."""

    def close(self) -> None:  # noqa: B027 (most feeds have no background work)
        """Stop background work; may be called again."""


class RolloutMaker(RolloutFeed):
    """Makes a rollout when it is requested: the synchronous mode, and what the other feeds get their rollouts from.

    `at_work` supervises the engines while they generate. `rollout_fn` is the user's rollout function; without one the
    dispatcher is called directly.
    """

    def __init__(
        self,
        runtime: RolloutRuntime,
        rollout_fn: Callable[..., object] | None,
        data_source: Any,
        *,
        log: Callable[..., object],
        at_work: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.runtime = runtime
        self._args = args = runtime.args
        self._rollout_fn = rollout_fn
        self.data_source = data_source
        self._batches = data_source if isinstance(data_source, JournaledSource) else runtime.journal
        self._log = log
        self.at_work = at_work
        batch_plugins = (
            args.dynamic_sampling_filter_path, args.rollout_sample_filter_path, args.rollout_all_samples_process_path,
        )  # fmt: skip
        self._is_foreign = rollout_fn is not None or any(path is not None for path in batch_plugins)
        """True if a function of the user may have changed samples after the rollout checked them."""

    def get(self, rollout_id: int, sample: Callable[[], RolloutFnTrainOutput] | None = None) -> GeneratedRollout:
        """Return the rollout from the journal if it is there, else from `sample()`, by default a new rollout.

        A new rollout is validated before it is recorded: invalid samples are marked as failed. The dispatcher's samples
        were checked when they finished; functions of the user may have changed them since.
        """
        args, runtime, source = self._args, self.runtime, self.data_source
        groups: list[Any]
        metrics: JsonObject
        seconds = 0.0
        found = None if self._batches is None else self._batches.batch(rollout_id)
        if found is not None:
            groups, metrics = found
        else:
            began = time.monotonic()
            with self.at_work():
                if sample is not None:
                    output = sample()
                else:
                    runtime.state.rollout_id = rollout_id  # for hooks, from any caller
                    with runtime.pulse.during(args.rollout_batch_size * args.n_samples_per_prompt):
                        if self._rollout_fn is None:
                            name = f"rollout {rollout_id}"
                            output = runtime.run(Dispatcher(runtime, source, rollout_id).fill(), whom=name)
                        else:
                            given = runtime.plugin_args, rollout_id, source
                            made = call_rollout_fn(self._rollout_fn, *given, evaluation=False)
                            assert isinstance(made, RolloutFnTrainOutput)
                            output = made
            seconds = time.monotonic() - began
            groups, metrics = output.samples, dict(output.metrics or {})
            if self._is_foreign and not (isinstance(groups, list) and _holds_samples(groups)):
                raise UserError(
                    f"--rollout-function-path {args.rollout_function_path} must return groups, lists of Sample or of "
                    f"lists of them, not {groups!r:.200}"
                )
            samples = list(leaves(groups))
            times = Counter(map(id, samples))
            if len(times) < len(samples):
                again = next(sample for sample in samples if times[id(sample)] > 1)
                logger.warning(
                    "rollout %d: --rollout-function-path %s returned %d samples, of which only %d are different "
                    "objects (sample %s of group %s comes %d times): each is trained on as often as it comes",
                    rollout_id,
                    args.rollout_function_path,
                    len(samples),
                    len(times),
                    again.index,
                    again.group_index,
                    times[id(again)],
                )
            for one in samples:
                kept = one.column_array("rollout_top_p_token_ids")
                is_cut = kept is not None and len(kept)
                if is_cut and not args.allow_biased_sampling and trains_on_log_probs(args):
                    raise UserError(
                        f"sample {one.index} has rollout_top_p_token_ids: its tokens were drawn from a part of the "
                        "vocabulary, but training takes log-probs over all of it, which biases the gradient: sample "
                        "without top-p, or accept that with --allow-biased-sampling"
                    )
                if self._is_foreign and not _is_settled(one, runtime.bounds):
                    DispatchedSample(one).settle(one, "rollout", runtime.failures, runtime.bounds)
            if self._is_foreign:
                refuse_all_failed(samples, f"rollout {rollout_id}")
            if "perf/rollout_time" not in metrics:  # the metrics of a user function are added to the usual ones
                metrics = rollout_metrics(args, samples, seconds) | metrics
            if may_train_on_stale_tokens(args):
                metrics |= staleness_metrics(samples, rollout_id)
            if self._batches is not None:
                self._batches.assign(rollout_id, groups, metrics)
            elif observes(source):
                source.observe_samples(rollout_id, groups)
        if args.save_debug_rollout_data is not None:
            save_rollout(args, rollout_id, groups)
        is_logged = self._log(rollout_id, runtime.plugin_args, list(leaves(groups)), dict(metrics), seconds) is True
        return GeneratedRollout(groups, metrics, is_logged)


def _holds_samples(nested: object) -> bool:
    return all(map(_holds_samples, nested)) if isinstance(nested, list | tuple) else isinstance(nested, Sample)


def _is_settled(sample: Sample, bounds: Bounds) -> bool:
    """Return whether a sample is complete and valid, so that `settle` would not change it."""
    if sample.status not in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED):
        return False
    try:
        check_sample(sample, bounds)
    except BadSample:
        return False
    return True


class OneStepAheadFeed(RolloutFeed):
    """One-step-ahead mode: a thread generates the next rollouts during training, up to `ready` in advance.

    Weight updates and evaluations happen only between two rollouts, so every rollout has one weight version.
    """

    def __init__(self, maker: RolloutMaker, *, start: int, total: int, ready: int) -> None:
        self._maker = maker
        self._numbers = range(start, total)
        self._most_ready = ready
        self._ready: deque[tuple[int, GeneratedRollout]] = deque()
        self._busy = self._held = self._closed = False
        self._changed = threading.Condition()
        self._making = background("rollouts ahead", self._make_all)

    def get(self, rollout_id: int) -> GeneratedRollout:
        with self._changed:
            self._wait(f"rollout {rollout_id}", "to be made", lambda: bool(self._ready))
            number, made = self._ready.popleft()
            assert number == rollout_id, f"rollout {number} was made when {rollout_id} was asked for"
            self._changed.notify_all()
            return made

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        with self._changed:
            self._held = True
            self._wait("the rollout being made", "to end", lambda: not self._busy)
        try:
            yield
        finally:
            with self._changed:
                self._held = False
                self._changed.notify_all()

    def close(self) -> None:
        """Start no further rollout; one in progress ends when its engines end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._making.close()

    def _wait(self, whom: str, why: str, is_so: Callable[[], bool]) -> None:
        """Wait until `is_so()`; raises the error of a background task that has died."""
        with waiting(whom, why, timeout_s=None):
            while not is_so():
                raise_failures()
                self._changed.wait(LOOK_S)

    def _make_all(self) -> None:
        for number in self._numbers:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (not self._held and len(self._ready) < self._most_ready))
                if self._closed:
                    return
                self._busy = True
            try:
                with acting_as(f"rollout {number}"):
                    made = self._maker.get(number)
                with self._changed:
                    self._ready.append((number, made))
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()


class FullyAsyncFeed(RolloutFeed):
    """Fully asynchronous mode: takes finished groups from a generation that continues during training and updates."""

    def __init__(self, maker: RolloutMaker, *, first: int, total: int, version: int) -> None:
        self._maker, self._run = maker, maker.runtime.run
        self._dispatcher = Dispatcher(maker.runtime, maker.data_source, first)
        self._watched = ExitStack()
        self._watched.enter_context(maker.at_work())  # also while the trainers work
        self._run(self._dispatcher.start(total=total, version=version))

    def get(self, rollout_id: int) -> GeneratedRollout:
        name = f"rollout {rollout_id}"
        return self._maker.get(rollout_id, lambda: self._run(self._dispatcher.take(rollout_id), whom=name))

    def weights_arrived(self, version: int) -> None:
        self._run(self._dispatcher.weights_arrived(version))

    def close(self) -> None:
        self._run(self._dispatcher.aclose())
        self._watched.close()


def make_feed(maker: RolloutMaker, *, start: int, total: int, replayed: Sequence[int]) -> RolloutFeed:
    """Create the feed for `--async-mode`; `replayed` are rollouts that are already in the journal."""
    args = maker.runtime.args
    if not is_async(args):
        return maker
    if args.async_mode == ONE_STEP:
        return OneStepAheadFeed(maker, start=start, total=total, ready=args.async_buffer_size)
    first = next((number for number in range(start, total) if number not in replayed), max(start, total))
    return FullyAsyncFeed(maker, first=first, total=total, version=start)
