"""One rollout, whatever mode makes it: sampled, or found in the journal of an earlier life of the run; dumped, logged.

Invariant: a rollout that leaves here is in the journal as a batch, whole; made again after a crash it is the same one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from slime.config import Config
from slime.config.asynchronous import is_async
from slime.rollout.base_types import RolloutFnTrainOutput, call_rollout_fn, leaves
from slime.rollout.dump import save_rollout
from slime.rollout.metrics import rollout_metrics
from slime.rollout.pulse import Pulse
from slime.rollout.staleness import staleness_metrics

LogFunction = Callable[..., Any]


@dataclass
class Generated:
    """One rollout with its metrics; `is_logged` when a function of the user has logged these already."""

    samples: list[Any]
    metrics: dict[str, Any]
    is_logged: bool


class RolloutMaker:
    """Makes rollouts by number; `at_work` watches over the engines meanwhile."""

    def __init__(
        self,
        args: Config,
        rollout_fn: Callable[..., Any],
        data_source: Any,
        *,
        journal: Any | None,
        log: LogFunction,
        at_work: Callable[[], AbstractContextManager[None]],
        pulse: Pulse | None = None,
    ) -> None:
        self._args = args
        self._rollout_fn = rollout_fn
        self._data_source = data_source
        self._journal = journal
        self._log = log
        self.at_work = at_work
        self._pulse = pulse or Pulse()

    def make(self, rollout_id: int) -> Generated:
        """The rollout from the journal if it was made before, else from the rollout function."""

        def call() -> RolloutFnTrainOutput:
            with self._pulse.during(self._args.rollout_batch_size * self._args.n_samples_per_prompt):
                output = call_rollout_fn(self._rollout_fn, self._args, rollout_id, self._data_source, evaluation=False)
            assert isinstance(output, RolloutFnTrainOutput)
            return output

        return self.make_with(rollout_id, call)

    def make_with(self, rollout_id: int, sample: Callable[[], RolloutFnTrainOutput]) -> Generated:
        """The same, with another way to sample."""
        found = None if self._journal is None else self._journal.batch(rollout_id)
        if found is not None:
            groups, metrics = found
            return self._finished(rollout_id, groups, metrics, seconds=0.0)
        began = time.monotonic()
        with self.at_work():
            output = sample()
        seconds = time.monotonic() - began
        samples = list(leaves(output.samples))
        made = rollout_metrics(self._args, samples, seconds) if output.metrics is None else dict(output.metrics)
        if is_async(self._args) or self._args.partial_rollout:
            made |= staleness_metrics(samples, rollout_id)
        if self._journal is not None:
            self._journal.assign(rollout_id, output.samples, made)
        return self._finished(rollout_id, output.samples, made, seconds)

    def _finished(self, rollout_id: int, groups: list[Any], metrics: dict[str, Any], seconds: float) -> Generated:
        save_rollout(self._args, rollout_id, groups)
        samples = list(leaves(groups))
        is_logged = self._log(rollout_id, self._args, samples, dict(metrics), seconds) is True
        return Generated(groups, metrics, is_logged)
