"""Runs the model's steps over the sequences of a scheduler and appends the tokens they sample.

Invariant: a step that raises is repeated for each of its sequences alone; a sequence that raises again fails alone. An
error that belongs to no sequence fails all of them (`fail_all`) and leaves an empty engine that can continue.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from slime.engine.embedded.kv_cache import KVCache
from slime.engine.embedded.model.runner import ModelRunner, Sampled, StepDecoder
from slime.engine.embedded.scheduler import Extend, Scheduler, Sequence, StepInterleaver
from slime.storage.json_types import JsonObject

log = logging.getLogger(__name__)

_STEPS_PER_CAPTURE = 64  # so that an engine that is never idle also captures the missing sizes


@dataclass
class EngineCounters:
    """Totals of an engine since its start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    requests: int = 0
    steps: int = 0
    busy_seconds: float = 0.0

    @property
    def computed(self) -> int:
        """Computed tokens; grows with every finished step."""
        return self.prefilled_tokens + self.generated_tokens


@dataclass
class Step:
    """A step: one token for each of `sequences`, computed by a launch whose result may not be read yet.

    In a decode step these are the decoding sequences, with `slots` for their last tokens; in an extend step the
    sequences whose prompts end with one of `extends`.
    """

    sequences: list[Sequence]
    slots: np.ndarray | None = None
    extends: list[Extend] = field(default_factory=list)
    launched: object = None

    def split(self) -> Iterator[tuple[Sequence, Step]]:
        """Yield each sequence with a step of its own."""
        if self.slots is None:
            for e in self.extends:
                yield e.sequence, Step([e.sequence] if e.is_sampled else [], extends=[e])
        else:
            for i, seq in enumerate(self.sequences):
                yield seq, Step([seq], self.slots[i : i + 1])


class StepExecutor:
    """Launches the steps and reads them in the order in which the decoder computes them; `version`: of the weights.

    A decoder that looks ahead always has the next step before the last one is read. A sequence that is known to end
    with an unread step is left out of the next step; one that meets a stop token computes one extra token, which is
    discarded. Finishing a sequence takes little time between two launches: its waiter is notified first, and the work
    for the prefix cache is deferred (`settle`) until the device has its next step.
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, *, version: str) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.decoder: StepDecoder = runner
        self.counters = EngineCounters()
        self.version = version
        self.flights: deque[Step] = deque()
        self.chores: list[Callable[[], object]] = []  # the deferred work
        self._turns = StepInterleaver()
        scheduler.before_release = self._record_experts

    def step(self) -> None:
        """Launch a step (prompt tokens, or one token for each decoding sequence) and read the one before it."""
        if self._launch():
            self.settle()
        elif self.flights:
            self._read_oldest()
        elif self.scheduler.prefilling:  # half-computed prompts block one another: retract the youngest
            self.scheduler.retract(self.scheduler.prefilling[-1])
        else:
            raise RuntimeError(
                f"{len(self.scheduler.waiting)} sequences wait and none runs, but there are no free KV slots for any"
            )
        while len(self.flights) > self.decoder.looks_ahead:
            self._read_oldest()
        if not self.decoder.looks_ahead:
            self.settle()
        if self.counters.steps % _STEPS_PER_CAPTURE == 0:
            self.decoder.capture_next()

    def quiesce(self) -> None:
        """Read every step in flight and do the deferred work."""
        self.land()
        self.settle()

    def land(self) -> None:
        """Read every step in flight."""
        while self.flights:
            self._read_oldest()

    def settle(self) -> None:
        """Do the deferred work: share computed prompts and release the slots of finished sequences."""
        chores, self.chores = self.chores, []
        for chore in chores:
            chore()

    def _launch(self) -> bool:
        """Launch the next step; False if nothing can be launched before a step is read or slots are freed."""
        s, step = self.scheduler, None
        members = [seq for seq in s.running if seq.wants_more]
        budget = self._turns.prompt_tokens(s, len(members), mixes=self.decoder.looks_ahead)
        if budget:
            self.settle()  # makes the prefixes and rows of finished sequences available
            extends = s.next_extends(self.version, budget)
            self._turns.extended(sum(e.end - e.start for e in extends))
            if extends:
                step = Step([e.sequence for e in extends if e.is_sampled], extends=extends)
        if step is None:
            if not members:
                return False
            if any(seq.ahead and not seq.plain and not self.decoder.foresees(seq) for seq in members):
                self.quiesce()
            slots = s.slots_for(len(members)) if self.flights else None
            if slots is None:  # slots are freed only while no step is in flight
                self.quiesce()
                slots, members = s.next_decode(), list(s.running)
            if slots is None:
                return True
            self._turns.decoded()
            step = Step(members, slots)
        self.counters.steps += 1
        try:
            step.launched = self._compute(step)
        except Exception as error:  # noqa: BLE001 - it belongs to one command or sequence
            self.quiesce()
            self._retry(step, error)
            return True
        for seq in step.sequences:
            seq.ahead += 1
            if step.slots is None:
                s.prefilled(seq)
        self.flights.append(step)
        return True

    def _compute(self, step: Step) -> object:
        if step.slots is None:
            return self.decoder.launch_extend(step.extends)
        return self.decoder.launch(step.sequences, step.slots, [seq.ahead for seq in step.sequences])

    def _read_oldest(self) -> None:
        """Read the oldest step; if it failed, repeat it sequence by sequence and undo the steps launched after it."""
        step = self.flights[0]
        try:
            sampled = self.decoder.collect(step.launched)
        except Exception as error:  # noqa: BLE001 - it belongs to one command or sequence
            self.settle()
            while self.flights:
                undone = self.flights.pop()
                for seq in undone.sequences:
                    seq.ahead -= 1
                    del seq.output_top[len(seq.output_ids) :]
                for e in undone.extends:
                    del e.sequence.input_logprobs[e.scored :]
                    if e.is_sampled and e.sequence.finish is None:
                        self.scheduler.undo_prefilled(e.sequence)
                if undone is step:  # it keeps its slots
                    break
                if undone.slots is not None:  # a sequence that left the batch has released its own slots itself
                    self.scheduler.cache.release(undone.slots)
                for e in reversed(undone.extends):
                    if e.sequence.finish is None:
                        self.scheduler.undo_extend(e)
            self._retry(step, error)
            return
        self.flights.popleft()
        for seq in step.sequences:
            seq.ahead -= 1
        self._apply(step, sampled)

    def _retry(self, step: Step, error: Exception) -> None:
        """Repeat a step that raised, one sequence at a time; a sequence that raises again fails alone."""
        log.error("a step of %d sequences failed", len(step.extends or step.sequences), exc_info=error)
        self._check_device()
        for seq, alone in step.split():
            del seq.output_top[len(seq.output_ids) :]
            cause: Exception | None = None
            if seq.finish is None:
                for e in alone.extends:
                    del seq.input_logprobs[e.scored :]
                try:
                    sampled = self.decoder.collect(self._compute(alone))
                except Exception as failure:  # noqa: BLE001 - it belongs to one command or sequence
                    cause = failure
                else:
                    if alone.slots is None and alone.sequences:
                        self.scheduler.prefilled(seq)
                    self._apply(alone, sampled)
                    continue
            if alone.slots is not None:
                self.scheduler.cache.release(alone.slots)
            if cause is not None:
                self._fail(seq, cause)
        self.settle()

    def _apply(self, step: Step, sampled: Sampled) -> None:
        """Append the sampled tokens, finish and notify sequences, and free the slots of those that ended before."""
        ended = [i for i, seq in enumerate(step.sequences) if seq.finish is not None]
        drawn = [each for each in zip(step.sequences, *sampled, strict=True) if each[0].finish is None]
        if step.slots is not None:
            if ended:
                self.scheduler.cache.release(step.slots[ended])
            for seq, _, _ in drawn:
                seq.computed += 1
        self.counters.prefilled_tokens += sum(e.end - e.start for e in step.extends)
        for e in step.extends:
            seq = e.sequence
            if not e.is_complete or seq.finish is not None:
                continue
            self.counters.prompt_tokens += len(seq.prompt_ids)
            self.counters.cached_tokens += seq.cached_tokens
            self.chores.append(partial(self.scheduler.share, seq))
            if seq.max_new_tokens == 0:
                seq.end({"type": "length", "length": 0})
                self.leave(seq)
        self.counters.generated_tokens += len(drawn)
        version = self.version
        for seq, token, logprob in drawn:
            try:
                seq.append(token, logprob, version)
            except Exception as error:  # noqa: BLE001 - it belongs to one command or sequence
                self._fail(seq, error)
                continue
            if seq.finish is not None:
                self.leave(seq)
            elif seq.stream:
                self._tell(seq)

    def _record_experts(self, seq: Sequence, slots: np.ndarray) -> None:
        """Record which experts computed a sequence's slots, before it loses them, if its request asks for them.

        Positions that are computed again after a retraction keep the experts that its tokens were sampled with.
        """
        if seq.routed_from is not None and (seq.output_ids or seq.finish is not None):
            known = sum(len(rows) for rows in seq.routed)
            seq.routed.append(self.runner.experts.of(slots[known:]))

    def leave(self, seq: Sequence) -> None:
        """Remove a finished sequence from the batch and notify its waiter; its slots are freed later (`settle`)."""
        if any(e.sequence is seq for step in self.flights for e in step.extends):
            seq.kv_version = None  # the step that fills its slots is not read yet and may fail
        self._turns.made_room()
        self.scheduler.leave(seq)
        if seq.routed_from is None:
            self.chores.append(partial(self.scheduler.drop, seq, version=self.version))
        else:  # its answer has the experts of its slots, so they are released first
            self.settle()
            self.scheduler.drop(seq, version=self.version)
        self._tell(seq)

    def _tell(self, seq: Sequence) -> None:
        try:
            seq.notify(seq)
        except Exception as error:  # affects only the waiter of this sequence
            log.error("cannot notify the waiter of request %s", seq.rid, exc_info=error)

    def _fail(self, seq: Sequence, error: Exception) -> None:
        """Fail a sequence that cannot be computed; the others continue, and its prefix is not shared."""
        log.error("request %s failed", seq.rid, exc_info=error)
        seq.end(_abort_reason(error))
        seq.kv_version = None
        self.leave(seq)

    def fail_all(self, error: Exception) -> None:
        """Fail all requests and continue with an empty engine; the last resort."""
        log.error("a step failed: all requests in the engine fail", exc_info=error)
        self._check_device()
        self.flights.clear()
        self.chores.clear()
        sequences = self.scheduler.all()
        cache = self.scheduler.cache
        self.scheduler.reset(KVCache(cache.pool.capacity, share_prefixes=cache.shares))
        for seq in sequences:
            seq.end(_abort_reason(error))
            self._tell(seq)

    def _check_device(self) -> None:
        """Raise if the device is unusable: after such an error CUDA returns it for every call."""
        if self.runner.cuda:
            torch.cuda.synchronize()
        self.runner.context.window.forget()


def _abort_reason(error: Exception) -> JsonObject:
    message = f"this request failed in the engine ({type(error).__name__}: {error})"
    return {"type": "abort", "message": message, "status_code": 500}
