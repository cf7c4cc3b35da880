"""Steps of the model over the sequences of a scheduler, and what becomes of their tokens.

Invariant: a step that raises is done once more for each of its sequences alone, and who raises again fails alone. An
error that belongs to no sequence fails all of them (`start_over`) and leaves an empty engine that can go on.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from slime.engine.embedded.kv_cache import KVCache
from slime.engine.embedded.model.runner import Decoder, ModelRunner, Sampled
from slime.engine.embedded.scheduler import Extend, Scheduler, Sequence, Turns

log = logging.getLogger(__name__)

_STEPS_PER_CAPTURE = 64  # an engine that is never idle prepares the sizes it lacks all the same


@dataclass
class Counters:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    requests: int = 0
    steps: int = 0
    busy_seconds: float = 0.0

    @property
    def computed(self) -> int:
        """Grows with every step that came to its end."""
        return self.prefilled_tokens + self.generated_tokens


@dataclass
class Flight:
    """A step that was launched and not read yet: one token for each of `sequences`.

    They are those that decode, with `slots` for their last tokens, or those whose prompts end with one of `extends`.
    """

    sequences: list[Sequence]
    launched: Any
    slots: np.ndarray | None = None
    extends: list[Extend] = field(default_factory=list)


class Steps:
    """What is launched next, in the order in which the decoder computes it; `version` is that of the weights.

    A decoder that looks ahead always has the next step before the last one is read. Who ends with a step that is not
    read yet is left out of the next where that can be known; who met a stop token has one token too many, which is
    forgotten. Leaving costs little on that way: whoever waits is told first, what is done for the prefix cache
    (`settle`) comes when the device has its next step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        counters: Counters,
        *,
        version: str,
        fresh_cache: Callable[[], KVCache],
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.decoder: Decoder = runner
        self.counters = counters
        self.version = version
        self.flights: deque[Flight] = deque()
        self._fresh_cache = fresh_cache
        self._chores: list[Callable[[], object]] = []
        self._turns = Turns()
        scheduler.before_release = self._keep_experts

    def step(self) -> None:
        """Launch a step, prompt tokens or one token for everybody who decodes, and read the one before it."""
        if self._launch():
            self.settle()
        elif self.flights:
            self._land()
        elif self.scheduler.prefilling:  # half-computed prompts block one another: the youngest makes room
            self.scheduler.retract(self.scheduler.prefilling[-1])
        else:
            raise RuntimeError(f"{len(self.scheduler.waiting)} sequences wait, none runs and none finds room")
        while len(self.flights) > self.decoder.looks_ahead:
            self._land()
        if not self.decoder.looks_ahead:
            self.settle()
        if self.counters.steps % _STEPS_PER_CAPTURE == 0:
            self.decoder.capture_next()

    def quiesce(self) -> None:
        """Read all that was launched, and leave nothing undone."""
        self.land()
        self.settle()

    def land(self) -> None:
        """Read all that was launched."""
        while self.flights:
            self._land()

    @property
    def is_unsettled(self) -> bool:
        return bool(self._chores)

    def settle(self) -> None:
        """Do what was put off for those who came and went."""
        chores, self._chores = self._chores, []
        for chore in chores:
            chore()

    # launching

    def _launch(self) -> bool:
        """False when there is nothing to launch before something is read or makes room."""
        members = [seq for seq in self.scheduler.running if seq.wants_more]
        budget = self._turns.prompt_tokens(self.scheduler, len(members), mixes=self.decoder.looks_ahead)
        if budget:
            self.settle()  # prefixes of those who left, and their rows
            extends = self.scheduler.next_extends(self.version, budget)
            self._turns.extended(sum(e.end - e.start for e in extends))
            if extends:
                self._launch_extend(extends)
                return True
        return bool(members) and self._launch_decode(members)

    def _launch_extend(self, extends: list[Extend]) -> None:
        self.counters.steps += 1
        try:
            self._take_off(extends)
        except Exception as error:  # noqa: BLE001 - it belongs to one command or sequence
            self.quiesce()
            self._extend_apart(extends, error)

    def _take_off(self, extends: list[Extend]) -> None:
        launched = self.decoder.launch_extend(extends)
        sampled = [e.sequence for e in extends if e.is_sampled]
        for seq in sampled:
            seq.ahead += 1
            self.scheduler.prefilled(seq)
        self.flights.append(Flight(sampled, launched, extends=extends))

    def _launch_decode(self, members: list[Sequence]) -> bool:
        s = self.scheduler
        if any(seq.ahead and not seq.plain and not self.decoder.foresees(seq) for seq in members):
            self.quiesce()
        slots = s.slots_for(len(members)) if self.flights else None
        if slots is None:  # nobody gives slots back while a step is in flight
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
            self._decode_apart(members, slots, error)
            return True
        for seq in members:
            seq.ahead += 1
        self.flights.append(Flight(members, launched, slots))
        return True

    # landing

    def _land(self) -> None:
        """Read the oldest step. If it failed, it is done once more, and what was launched on top of it is void."""
        flight = self.flights[0]
        try:
            sampled = self.decoder.collect(flight.launched)
        except Exception as error:  # noqa: BLE001 - it belongs to one command or sequence
            self.settle()
            while len(self.flights) > 1:
                self._void(self.flights.pop())
            self.flights.clear()
            self._undo(flight)
            if flight.slots is None:
                self._extend_apart(flight.extends, error)
            else:
                self._decode_apart(flight.sequences, flight.slots, error)
            return
        self.flights.popleft()
        for seq in flight.sequences:
            seq.ahead -= 1
        if flight.slots is None:
            self._take_extends(flight.extends, sampled)
        else:
            self._take_step(flight.sequences, flight.slots, sampled)

    def _undo(self, flight: Flight) -> None:
        """As if it had not been launched; its slots stay taken."""
        for seq in flight.sequences:
            seq.ahead -= 1
            del seq.output_top[len(seq.output_ids) :]
        for e in flight.extends:
            del e.sequence.input_logprobs[e.scored :]
            if e.is_sampled and e.sequence.finish is None:
                self.scheduler.not_prefilled(e.sequence)

    def _void(self, flight: Flight) -> None:
        """What was computed on top of a step that failed; a sequence that left has given its slots back itself."""
        self._undo(flight)
        if flight.slots is not None:
            self.scheduler.cache.release(flight.slots)
        for e in reversed(flight.extends):
            if e.sequence.finish is None:
                self.scheduler.not_extended(e)

    def _take_extends(self, extends: list[Extend], sampled: Sampled) -> None:
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
        self._take_tokens([(seq, *drawn[seq]) for seq in complete if seq in drawn])

    def _extend_apart(self, extends: list[Extend], error: Exception) -> None:
        """An extend step that raised, one sequence at a time: who raises again fails alone."""
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
            self._take_extends([e], own)
        self.settle()

    def _decode_apart(self, running: list[Sequence], slots: np.ndarray, error: Exception) -> None:
        """A decode step that raised, one sequence at a time: who raises again fails alone."""
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
            self._take_step([seq], slot, sampled)
        self.settle()

    def _take_step(self, running: list[Sequence], slots: np.ndarray, sampled: Sampled) -> None:
        gone = [i for i, seq in enumerate(running) if seq.finish is not None]
        if gone:
            self.scheduler.cache.release(slots[gone])
        alive = [step for step in zip(running, *sampled, strict=True) if step[0].finish is None]
        for seq, _, _ in alive:
            seq.computed += 1
        self._take_tokens(alive)

    def _take_tokens(self, drawn: list[tuple[Sequence, int, float]]) -> None:
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

    def _keep_experts(self, seq: Sequence, slots: np.ndarray) -> None:
        """Before a sequence loses its slots: which experts computed them, if it asked and something came out of them.

        What is computed a second time, after the slots were taken away, keeps the experts that its tokens came from.
        """
        if seq.routed_from is not None and (seq.output_ids or seq.finish is not None):
            known = sum(len(rows) for rows in seq.routed)
            seq.routed.append(self.runner.experts.of(slots[known:]))

    def leave(self, seq: Sequence) -> None:
        """A finished sequence is out of the batch and answered; what its slots hold is settled later."""
        if any(e.sequence is seq for flight in self.flights for e in flight.extends):
            seq.kv_version = None  # it is not known yet whether its slots hold what they should
        self._turns.made_room()
        self.scheduler.leave(seq)
        if seq.routed_from is None:
            self._chores.append(partial(self.scheduler.drop, seq, version=self.version))
        else:  # the answer tells what is known of its slots
            self.settle()
            self.scheduler.drop(seq, version=self.version)
        self._tell(seq)

    def _tell(self, seq: Sequence) -> None:
        try:
            seq.notify(seq)
        except Exception as error:  # whoever waits for this sequence cannot be told, which is nobody else's concern
            log.error("nobody can be told of request %s", seq.rid, exc_info=error)

    def _fail(self, seq: Sequence, error: Exception) -> None:
        """This sequence cannot be computed; the others go on, and what it computed is shared with nobody."""
        log.error("request %s failed", seq.rid, exc_info=error)
        seq.end(_failure(error))
        seq.kv_version = None
        self.leave(seq)

    def start_over(self, error: Exception) -> None:
        """The last resort: all requests fail, and the engine goes on with nothing in it."""
        log.error("a step failed: all requests in the engine fail with it", exc_info=error)
        self._check_device()
        self.flights.clear()
        self._chores.clear()
        everyone = self.scheduler.all()
        self.scheduler.reset(self._fresh_cache())
        for seq in everyone:
            seq.end(_failure(error))
            self._tell(seq)

    def _check_device(self) -> None:
        """Raise when the device computes no more: after such an error CUDA answers every call with it."""
        if self.runner.cuda:
            torch.cuda.synchronize()
        self.runner.context.window.forget()


def _failure(error: Exception) -> dict[str, Any]:
    message = f"this request failed in the engine ({type(error).__name__}: {error})"
    return {"type": "abort", "message": message, "status_code": 500}
