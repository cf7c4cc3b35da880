"""Runs the model's steps over the sequences of a scheduler and appends the tokens they sample.

Invariant: a step that raises is repeated for each of its sequences alone; a sequence that raises again fails alone. An
error that belongs to no sequence fails all of them (`fail_all`) and leaves an empty engine that can continue.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
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
class StepInFlight:
    """A step that was launched and not read yet; it samples one token for each of `sequences`.

    In a decode step these are the decoding sequences, with `slots` for their last tokens; in an extend step the
    sequences whose prompts end with one of `extends`.
    """

    sequences: list[Sequence]
    launched: object
    slots: np.ndarray | None = None
    extends: list[Extend] = field(default_factory=list)


class StepExecutor:
    """Launches the steps and reads them in the order in which the decoder computes them; `version`: of the weights.

    A decoder that looks ahead always has the next step before the last one is read. A sequence that is known to end
    with an unread step is left out of the next step; one that meets a stop token computes one extra token, which is
    discarded. Finishing a sequence takes little time between two launches: its waiter is notified first, and the work
    for the prefix cache is deferred (`settle`) until the device has its next step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        counters: EngineCounters,
        *,
        version: str,
        fresh_cache: Callable[[], KVCache],
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.decoder: StepDecoder = runner
        self.counters = counters
        self.version = version
        self.flights: deque[StepInFlight] = deque()
        self._fresh_cache = fresh_cache
        self._chores: list[Callable[[], object]] = []
        self._turns = StepInterleaver()
        scheduler.before_release = self._record_experts

    def step(self) -> None:
        """Launch a step (prompt tokens, or one token for each decoding sequence) and read the one before it."""
        if self._launch():
            self.settle()
        elif self.flights:
            self._land()
        elif self.scheduler.prefilling:  # half-computed prompts block one another: retract the youngest
            self.scheduler.retract(self.scheduler.prefilling[-1])
        else:
            raise RuntimeError(
                f"{len(self.scheduler.waiting)} sequences wait and none runs, but there are no free KV slots for any"
            )
        while len(self.flights) > self.decoder.looks_ahead:
            self._land()
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
            self._land()

    @property
    def is_unsettled(self) -> bool:
        return bool(self._chores)

    def settle(self) -> None:
        """Do the deferred work: share computed prompts and release the slots of finished sequences."""
        chores, self._chores = self._chores, []
        for chore in chores:
            chore()

    # launching

    def _launch(self) -> bool:
        """Launch the next step; False if nothing can be launched before a step is read or slots are freed."""
        members = [seq for seq in self.scheduler.running if seq.wants_more]
        budget = self._turns.prompt_tokens(self.scheduler, len(members), mixes=self.decoder.looks_ahead)
        if budget:
            self.settle()  # makes the prefixes and rows of finished sequences available
            extends = self.scheduler.next_extends(self.version, budget)
            self._turns.extended(sum(e.end - e.start for e in extends))
            if extends:
                self.counters.steps += 1
                try:
                    launched = self.decoder.launch_extend(extends)
                    sampled = [e.sequence for e in extends if e.is_sampled]
                    for seq in sampled:
                        seq.ahead += 1
                        self.scheduler.prefilled(seq)
                    self.flights.append(StepInFlight(sampled, launched, extends=extends))
                except Exception as error:  # noqa: BLE001 - it belongs to one command or sequence
                    self.quiesce()
                    self._retry_extends(extends, error)
                return True
        return bool(members) and self._launch_decode(members)

    def _launch_decode(self, members: list[Sequence]) -> bool:
        s = self.scheduler
        if any(seq.ahead and not seq.plain and not self.decoder.foresees(seq) for seq in members):
            self.quiesce()
        slots = s.slots_for(len(members)) if self.flights else None
        if slots is None:  # slots are freed only while no step is in flight
            self.quiesce()
            slots, members = s.next_decode(), list(s.running)
        if slots is None:
            return True
        self.counters.steps += 1
        self._turns.decoded()
        try:
            launched = self.decoder.launch(members, slots, [seq.ahead for seq in members])
        except Exception as error:  # noqa: BLE001 - it belongs to one command or sequence
            self.quiesce()
            self._retry_decode(members, slots, error)
            return True
        for seq in members:
            seq.ahead += 1
        self.flights.append(StepInFlight(members, launched, slots))
        return True

    # reading

    def _land(self) -> None:
        """Read the oldest step; if it failed, repeat it sequence by sequence and undo the steps launched after it."""
        flight = self.flights[0]
        try:
            sampled = self.decoder.collect(flight.launched)
        except Exception as error:  # noqa: BLE001 - it belongs to one command or sequence
            self.settle()
            while len(self.flights) > 1:
                later = self.flights.pop()
                self._undo(later)
                if later.slots is not None:  # a sequence that left the batch has released its own slots itself
                    self.scheduler.cache.release(later.slots)
                for e in reversed(later.extends):
                    if e.sequence.finish is None:
                        self.scheduler.undo_extend(e)
            self.flights.clear()
            self._undo(flight)
            if flight.slots is None:
                self._retry_extends(flight.extends, error)
            else:
                self._retry_decode(flight.sequences, flight.slots, error)
            return
        self.flights.popleft()
        for seq in flight.sequences:
            seq.ahead -= 1
        if flight.slots is None:
            self._apply_extends(flight.extends, sampled)
        else:
            self._apply_decode(flight.sequences, flight.slots, sampled)

    def _undo(self, flight: StepInFlight) -> None:
        """Undo the launch of a step for its sequences; its slots stay allocated."""
        for seq in flight.sequences:
            seq.ahead -= 1
            del seq.output_top[len(seq.output_ids) :]
        for e in flight.extends:
            del e.sequence.input_logprobs[e.scored :]
            if e.is_sampled and e.sequence.finish is None:
                self.scheduler.undo_prefilled(e.sequence)

    def _apply_extends(self, extends: list[Extend], sampled: Sampled) -> None:
        self.counters.prefilled_tokens += sum(e.end - e.start for e in extends)
        drawn = dict(zip((e.sequence for e in extends if e.is_sampled), zip(*sampled, strict=True), strict=True))
        complete = [e.sequence for e in extends if e.is_complete and e.sequence.finish is None]
        for seq in complete:
            self.counters.prompt_tokens += len(seq.prompt_ids)
            self.counters.cached_tokens += seq.cached_tokens
            self._chores.append(partial(self.scheduler.share, seq))
            if seq.max_new_tokens == 0:
                seq.end({"type": "length", "length": 0})
                self.leave(seq)
        self._append_tokens([(seq, *drawn[seq]) for seq in complete if seq in drawn])

    def _retry_extends(self, extends: list[Extend], error: Exception) -> None:
        """Repeat an extend step that raised, one sequence at a time; a sequence that raises again fails alone."""
        log.error("an extend step of %d sequences failed", len(extends), exc_info=error)
        self._check_device()
        for e in extends:
            seq = e.sequence
            if seq.finish is not None:
                continue
            del seq.input_logprobs[e.scored :], seq.output_top[len(seq.output_ids) :]
            try:
                own = self.decoder.collect(self.decoder.launch_extend([e]))
            except Exception as cause:  # noqa: BLE001 - it belongs to one command or sequence
                self._fail(seq, cause)
                continue
            if e.is_sampled:
                self.scheduler.prefilled(seq)
            self._apply_extends([e], own)
        self.settle()

    def _retry_decode(self, running: list[Sequence], slots: np.ndarray, error: Exception) -> None:
        """Repeat a decode step that raised, one sequence at a time; a sequence that raises again fails alone."""
        log.error("a decode step of %d sequences failed", len(running), exc_info=error)
        self._check_device()
        for at, seq in enumerate(running):
            del seq.output_top[len(seq.output_ids) :]
            slot = slots[at : at + 1]
            if seq.finish is not None:
                self.scheduler.cache.release(slot)
                continue
            try:
                sampled = self.decoder.collect(self.decoder.launch([seq], slot, [0]))
            except Exception as cause:  # noqa: BLE001 - it belongs to one command or sequence
                self.scheduler.cache.release(slot)
                self._fail(seq, cause)
                continue
            self._apply_decode([seq], slot, sampled)
        self.settle()

    def _apply_decode(self, running: list[Sequence], slots: np.ndarray, sampled: Sampled) -> None:
        finished = [i for i, seq in enumerate(running) if seq.finish is not None]
        if finished:
            self.scheduler.cache.release(slots[finished])
        alive = [step for step in zip(running, *sampled, strict=True) if step[0].finish is None]
        for seq, _, _ in alive:
            seq.computed += 1
        self._append_tokens(alive)

    def _append_tokens(self, drawn: list[tuple[Sequence, int, float]]) -> None:
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

    # leaving

    def _record_experts(self, seq: Sequence, slots: np.ndarray) -> None:
        """Record which experts computed a sequence's slots, before it loses them, if its request asks for them.

        Positions that are computed again after a retraction keep the experts that its tokens were sampled with.
        """
        if seq.routed_from is not None and (seq.output_ids or seq.finish is not None):
            known = sum(len(rows) for rows in seq.routed)
            seq.routed.append(self.runner.experts.of(slots[known:]))

    def leave(self, seq: Sequence) -> None:
        """Remove a finished sequence from the batch and notify its waiter; its slots are freed later (`settle`)."""
        if any(e.sequence is seq for flight in self.flights for e in flight.extends):
            seq.kv_version = None  # the step that fills its slots is not read yet and may fail
        self._turns.made_room()
        self.scheduler.leave(seq)
        if seq.routed_from is None:
            self._chores.append(partial(self.scheduler.drop, seq, version=self.version))
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
        self._chores.clear()
        sequences = self.scheduler.all()
        self.scheduler.reset(self._fresh_cache())
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
