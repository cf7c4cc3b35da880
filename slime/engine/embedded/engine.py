"""The engine's thread: takes requests and commands between steps, steps the model, notifies the waiters.

Invariant: only this thread touches scheduler, cache and model; other threads enqueue work through `submit` and `call`.
An exception on behalf of one command or one sequence fails only that one; an error that belongs to no sequence fails
all sequences in the engine, which continues empty. Only an error that leaves the device unusable ends the engine:
`on_death` gets the exception and every waiter an abort.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import torch

from slime.engine.embedded.errors import BadRequest, StaleWeights
from slime.engine.embedded.executor import StepExecutor
from slime.engine.embedded.loader import LoadedEngine
from slime.engine.embedded.model.runner import ModelRunner
from slime.engine.embedded.options import EngineOptions
from slime.engine.embedded.scheduler import Scheduler, Sequence
from slime.engine.embedded.weight_updates import WeightUpdates
from slime.engine.embedded.weights.process_groups import WeightGroups
from slime.storage.json_types import JsonObject

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class EngineTask:
    """A task from another thread; with `meets_steps` it may run while steps are in flight."""

    run: Callable[[], object]
    meets_steps: bool = False


PAUSE_MODES = ("abort", "in_place", "retract")
_ANSWERS_FIRST_S = 0.1


class EngineCore:
    """The engine that runs in its own thread: its tasks, its steps, its pauses, and its memory."""

    scheduler: Scheduler
    runner: ModelRunner
    steps: StepExecutor
    weights: WeightUpdates

    def __init__(self, options: EngineOptions, *, on_death: Callable[[BaseException], object]) -> None:
        self.options = options
        self.groups = WeightGroups()
        self.paused = False
        self._is_cache_released = False
        self._on_death = on_death
        self._inbox: queue.SimpleQueue[EngineTask] = queue.SimpleQueue()
        self._is_stopping = False
        self._thread: threading.Thread | None = None

    def load(self, device: str) -> None:
        """Load the model; slow, called once before `start`."""
        self.loaded = engine = LoadedEngine(self.options, device)
        self.scheduler, self.runner, self.steps = engine.scheduler, engine.runner, engine.steps
        self.weights = WeightUpdates(engine, self.options)

    @property
    def weight_version(self) -> str:
        return self.steps.version

    # called from other threads

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        def end() -> None:
            self._is_stopping = True

        self._inbox.put(EngineTask(end))
        if self._thread is not None:
            self._thread.join(timeout=30)

    def submit(self, sequences: list[Sequence]) -> None:
        """Let the engine generate these sequences."""

        def accept() -> None:
            self.steps.counters.requests += len(sequences)
            self.scheduler.add(sequences)

        self._inbox.put(EngineTask(accept, meets_steps=True))

    def call(self, function: Callable[[], T], *, meets_steps: bool = False) -> Future[T]:
        """Run `function` in the engine's thread between two steps, unless the future is cancelled before.

        The steps in flight are read first, unless `meets_steps` allows `function` to run while they are in flight.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # the caller cancelled it
            try:
                result = function()
            except Exception as error:  # noqa: BLE001 - it belongs to one command or sequence
                future.set_exception(error)
            else:
                future.set_result(result)

        self._inbox.put(EngineTask(run, meets_steps))
        return future

    # the engine's thread

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                try:
                    self._turn()
                except Exception as error:  # noqa: BLE001 - it belongs to one command or sequence
                    self.steps.fail_all(error)
        except BaseException as error:
            log.exception("the engine's thread died")
            self._on_death(error)
            raise
        finally:
            self.abort_all("the engine stopped")

    def _turn(self) -> None:
        """Run the tasks that arrived, waiting for one if there is nothing to compute, and then make one step.

        With stale weights every request ends instead: with its tokens, or with status 503 if it has none.
        """
        task = None
        if self.halted or self.scheduler.idle:
            self.steps.land()
            if self.steps.chores:  # settled later: it takes the interpreter from the threads that write the answers
                with suppress(queue.Empty):
                    task = self._inbox.get(timeout=_ANSWERS_FIRST_S)
                if task is None:
                    self.steps.settle()
            if task is None:  # capture graphs until a task arrives
                while not self.halted and self._inbox.empty() and self.steps.decoder.capture_next():
                    pass
                task = self._inbox.get()
        while task is not None or not self._inbox.empty():
            task = task or self._inbox.get()
            if not task.meets_steps:  # the steps in flight come first, unless it may meet them
                self.steps.quiesce()
            task.run()
            task = None
        if self.halted or self.scheduler.idle:
            return
        if self.weights.stale is not None:
            reason = f"the weights are stale: {self.weights.stale}"
            for seq in self.scheduler.all():
                status = {} if seq.output_ids else {"status_code": StaleWeights.status}
                seq.end({"type": "abort", "message": reason, **status})
                self.steps.leave(seq)
            return
        started = time.perf_counter()
        self.steps.step()
        self.steps.counters.busy_seconds += time.perf_counter() - started

    # commands, run through `call`

    def abort(self, rid: str, reason: str = "aborted by request") -> int:
        """Abort all samples of the request with id `rid`; returns the number of its sequences."""
        return self.abort_sequences(self.scheduler.of_request(rid), reason)

    def abort_all(self, reason: str = "aborted by request") -> int:
        return self.abort_sequences(self.scheduler.all(), reason)

    def abort_sequences(self, sequences: list[Sequence], reason: str) -> int:
        """Abort exactly these sequences, except finished ones; returns their number."""
        for seq in sequences:
            if seq.finish is None:
                seq.end({"type": "abort", "message": reason})
                self.steps.leave(seq)
        return len(sequences)

    @property
    def halted(self) -> bool:
        """True while no step is made: the engine is paused, memory is released, or an update is unfinished."""
        weights = self.weights
        return self.paused or self._is_cache_released or weights.is_released or weights.unfinished is not None

    def pause(self, mode: str) -> None:
        if mode == "abort":
            self.abort_all("generation was paused")
        if mode == "retract":
            for seq in reversed([*self.scheduler.running, *self.scheduler.prefilling]):
                self.scheduler.retract(seq)
        self.paused = True

    def resume(self) -> None:
        if self.weights.unfinished is not None:
            self.weights.mark_stale(str(self.weights.unfinished))
        self.paused = False

    def flush_cache(self) -> None:
        self.scheduler.cache.tree.clear()

    def update(self, load: Callable[[], int], pause_mode: str | None = None) -> tuple[int, float]:
        """Run an update of the weights; with a pause mode, between `pause` and `resume`. Returns bytes and seconds.

        An engine that was paused before stays so.
        """
        began, was_paused = time.perf_counter(), self.paused
        if pause_mode is not None:
            self.pause(pause_mode)
        try:
            copied = load()
        finally:
            if pause_mode is not None and not was_paused:
                self.resume()
        return copied, time.perf_counter() - began

    def release_memory(self, tags: list[str], *, discard_weights: bool = False) -> None:
        """Release device memory: the KV cache is dropped, weights are kept on the host or (`discard_weights`) dropped.

        CUDA graphs have no memory of their own to release: where memory keeps its addresses they stay valid, else they
        are dropped when either is released, and captured again when both are back.
        """
        if not self.scheduler.idle:
            raise BadRequest(
                f"{len(self.scheduler.all())} requests are running: abort them or wait before releasing memory"
            )
        runner, memory = self.runner, self.loaded.memory
        if "kv_cache" in tags and not self._is_cache_released:
            self.flush_cache()
            if memory is None:
                runner.free_kv()
            else:
                runner.forget_kv()
                memory.release_cache()
            self._is_cache_released = True
        if "weights" in tags and not self.weights.is_released:
            self.weights.release(discard=discard_weights)
        if runner.cuda:
            if memory is None and self.released:
                self.steps.decoder = runner
            torch.cuda.empty_cache()
            log.info("released %s; torch keeps %.2f GiB", tags, torch.cuda.memory_reserved() / 2**30)

    def resume_memory(self, tags: list[str]) -> None:
        """Allocate the memory again; discarded weights are stale until whole ones are published."""
        runner, memory = self.runner, self.loaded.memory
        for tag in tags:
            if tag not in self.released:
                continue
            if tag == "weights":
                self.weights.restore()
            elif memory is not None:
                memory.restore_cache()
            else:
                runner.allocate_kv(self.loaded.capacity)
            if runner.cuda and memory is None and self.released == [tag]:
                self.loaded.prepare_cuda()
            if tag == "weights":
                self.weights.is_released = False
            else:
                self._is_cache_released = False

    @property
    def released(self) -> list[str]:
        """The parts of the memory that are released."""
        return [
            tag for tag, gone in (("kv_cache", self._is_cache_released), ("weights", self.weights.is_released)) if gone
        ]

    def info(self) -> JsonObject:
        self.steps.settle()
        s, capacity = self.scheduler, self.loaded.capacity
        return {
            "weight_version": self.weight_version,
            "context_length": self.loaded.context_len,
            "max_total_num_tokens": capacity,
            "max_running_requests": s.max_running,
            "num_running_reqs": len(s.running) + len(s.prefilling),
            "num_waiting_reqs": len(s.waiting),
            "num_used_tokens": capacity - s.cache.pool.free - s.cache.tree.held,
            "num_cached_tokens": s.cache.tree.held,
            "num_retractions": s.retractions,
            "paused": self.halted,
            "stale": self.weights.stale,
            "lora_adapter": self.weights.adapter.name,
            "released": self.released,
            "totals": vars(self.steps.counters).copy(),
        }
