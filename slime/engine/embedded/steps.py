"""Steps of the model over the sequences of a scheduler, and what becomes of their tokens.

Invariant: a step that raises is done once more for each of its sequences alone, and who raises again fails alone. An
error that belongs to no sequence fails all of them (`start_over`) and leaves an empty engine that can go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slime.engine.embedded.cache import KVCache
from slime.engine.embedded.model.runner import Decoder, ModelRunner, Sampled
from slime.engine.embedded.scheduler import Extend, Scheduler
from slime.engine.embedded.sequence import Sequence

log = logging.getLogger(__name__)


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
    """A decode step that was launched and not read yet."""

    running: list[Sequence]
    slots: np.ndarray
    launched: Any


class Steps:
    """`is_quiet` says that no command and no newcomer waits outside; `version` is that of the weights."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        counters: Counters,
        *,
        version: str,
        fresh_cache: Callable[[], KVCache],
        is_quiet: Callable[[], bool],
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.decoder: Decoder = runner
        self.counters = counters
        self.version = version
        self.flight: Flight | None = None
        self._fresh_cache = fresh_cache
        self._is_quiet = is_quiet
        scheduler.before_release = self._keep_experts

    def step(self) -> None:
        """Prompt tokens of waiting sequences, or one token for every running one."""
        self.counters.steps += 1
        extends = self.scheduler.next_extends(self.version) if self.flight is None else []
        if extends:
            self._extend(extends)
        elif self.scheduler.running or self.flight is not None:
            self._decode()
        elif self.scheduler.prefilling:  # half-computed prompts block one another: the youngest makes room
            self.scheduler.retract(self.scheduler.prefilling[-1])
        else:
            raise RuntimeError(f"{len(self.scheduler.waiting)} sequences wait, none runs and none finds room")

    def _extend(self, extends: list[Extend]) -> None:
        extends, sampled = self._computed(extends)
        self.counters.prefilled_tokens += sum(e.end - e.start for e in extends)
        complete = [e.sequence for e in extends if e.is_complete]
        for seq in complete:
            self.counters.prompt_tokens += len(seq.prompt_ids)
            self.counters.cached_tokens += seq.cached_tokens
            self.scheduler.prefilled(seq)
            if seq.max_new_tokens == 0:
                seq.end({"type": "length", "length": 0})
                self.leave(seq)
        self._take_tokens([s for s in complete if s.max_new_tokens > 0], sampled)

    def _computed(self, extends: list[Extend]) -> tuple[list[Extend], Sampled]:
        """Run an extend step; if it raises, one sequence at a time: who raises again fails alone."""
        marks = [(len(e.sequence.input_logprobs), len(e.sequence.output_top)) for e in extends]
        try:
            return extends, self.decoder.collect(self.decoder.launch_extend(extends))
        except Exception as error:
            log.error("an extend step of %d sequences failed", len(extends), exc_info=error)
            self._check_device()
        kept: list[Extend] = []
        tokens: list[int] = []
        logprobs: list[float] = []
        for e, (scored, tops) in zip(extends, marks, strict=True):
            del e.sequence.input_logprobs[scored:], e.sequence.output_top[tops:]
            try:
                own = self.decoder.collect(self.decoder.launch_extend([e]))
            except Exception as error:  # noqa: BLE001 - it belongs to one command or sequence
                self._fail(e.sequence, error)
                continue
            kept.append(e)
            tokens += own[0]
            logprobs += own[1]
        return kept, (tokens, logprobs)

    def _decode(self) -> None:
        """One token for every running sequence; the next step is launched first where nothing stands in its way."""
        flight = self.flight or self._take_off()
        if flight is None:
            return
        following = self._follow(flight) if self._may_follow(flight) else None
        if self.land(flight):
            self.flight = following
        elif following is not None:
            self.scheduler.cache.release(following.slots)

    def _take_off(self) -> Flight | None:
        slots = self.scheduler.next_decode()
        if slots is None:
            return None
        running = list(self.scheduler.running)
        try:
            return Flight(running, slots, self.decoder.launch(running, slots, [0] * len(running)))
        except Exception as error:  # noqa: BLE001 - it belongs to one command or sequence
            self._decode_apart(running, slots, error)
            return None

    def _may_follow(self, flight: Flight) -> bool:
        """Nobody is waiting, nobody's length ends with this step, and drawing needs nothing that is still unread."""
        s = self.scheduler
        if not self.decoder.looks_ahead or s.waiting or s.prefilling or not self._is_quiet():
            return False
        return all(
            self.decoder.foresees(q) and len(q.output_ids) + 1 < q.max_new_tokens and q.finish is None
            for q in flight.running
        )

    def _follow(self, flight: Flight) -> Flight | None:
        slots = self.scheduler.cache.take(len(flight.running))
        if slots is None:
            return None
        try:
            return Flight(flight.running, slots, self.decoder.launch(flight.running, slots, [1] * len(flight.running)))
        except Exception as error:  # the step is tried again when it is due, and who is to blame is found there
            log.error("a decode step could not be launched ahead", exc_info=error)
            self.scheduler.cache.release(slots)
            return None

    def land(self, flight: Flight) -> bool:
        """Read a step's tokens; a sequence that finished meanwhile has one too many, which is forgotten.

        False when the step had failed and was done once more: what was launched on top of it is void.
        """
        self.flight = None
        try:
            sampled = self.decoder.collect(flight.launched)
        except Exception as error:  # noqa: BLE001 - it belongs to one command or sequence
            self._decode_apart(flight.running, flight.slots, error)
            return False
        self._take_step(flight.running, flight.slots, sampled)
        return True

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

    def _take_step(self, running: list[Sequence], slots: np.ndarray, sampled: Sampled) -> None:
        tokens, logprobs = sampled
        gone = [i for i, seq in enumerate(running) if seq.finish is not None]
        if gone:
            self.scheduler.cache.release(slots[gone])
        alive = [step for step in zip(running, tokens, logprobs, strict=True) if step[0].finish is None]
        for seq, _, _ in alive:
            seq.computed += 1
        self._take_tokens([s for s, _, _ in alive], ([t for _, t, _ in alive], [lp for _, _, lp in alive]))

    def _take_tokens(self, sequences: list[Sequence], sampled: Sampled) -> None:
        self.counters.generated_tokens += len(sequences)
        version = self.version
        for seq, token, logprob in zip(sequences, *sampled, strict=True):
            try:
                seq.append(token, logprob, version)
            except Exception as error:  # noqa: BLE001 - it belongs to one command or sequence
                self._fail(seq, error)
                continue
            if seq.finish is not None:
                self.leave(seq)
            elif seq.stream:
                self._tell(seq)

    def _keep_experts(self, seq: Sequence, slots: np.ndarray) -> None:
        """Before a sequence loses its slots: which experts computed them, if it asked and something came out of them.

        What is computed a second time, after the slots were taken away, keeps the experts that its tokens came from.
        """
        if seq.routed_from is not None and (seq.output_ids or seq.finish is not None):
            known = sum(len(rows) for rows in seq.routed)
            seq.routed.append(self.runner.experts.of(slots[known:]))

    def leave(self, seq: Sequence) -> None:
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
        self.flight = None
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
