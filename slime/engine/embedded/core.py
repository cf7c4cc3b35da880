"""The engine's thread: takes requests and commands between steps, steps the model, tells the waiters.

Invariant: scheduler, cache and model are touched by this thread only; other threads hand in work through `submit` and
`call`. What raises on behalf of one command or one sequence fails that one and nobody else; an error that belongs to
no sequence fails all that are in the engine, which goes on empty. Only what leaves the device unusable ends the engine:
`on_death` gets the exception and every waiter an abort.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from slime.engine.embedded.loaded_engine import LoadedEngine
from slime.engine.embedded.options import EngineOptions
from slime.engine.embedded.refusals import BadRequest, Conflict, HalfWritten, shown
from slime.engine.embedded.sequence import Sequence
from slime.engine.embedded.weights import loading
from slime.engine.embedded.weights.adapter import ArrivingAdapter, MergedAdapter, adapter_in
from slime.engine.embedded.weights.groups import Announced, WeightGroups
from slime.engine.embedded.weights.shared import DeviceMemory, HostMemory, OpenBucket, SharedMemory
from slime.models.adapter import Adapter, AdapterFacts
from slime.models.delta.folder import BadDelta, DeltaIndex, read_index

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """What another thread wants done; `meets_steps`: while steps are in flight, too."""

    run: Callable[[], None]
    meets_steps: bool = False


PAUSE_MODES = ("abort", "in_place", "retract")
_ANSWERS_FIRST_S = 0.1


class EngineCore(LoadedEngine):
    def __init__(self, options: EngineOptions, *, on_death: Callable[[BaseException], object]) -> None:
        super().__init__(options)
        self.paused = False
        self.stale: str | None = None
        self.groups = WeightGroups()
        self._shared = SharedMemory()
        self._unfinished: str | None = None
        self._released: set[str] = set()
        self._discarded = False  # the weights that are released have no copy
        self._on_death = on_death
        self._inbox: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def load(self, device: str) -> None:
        """Load the model; called once before `start`."""
        super().load(device)
        self.views, o = self.model.views, self.options
        self._arriving = ArrivingAdapter(self.views)
        self.adapter = MergedAdapter(self.views, o.model_path, trust_remote_code=o.trust_remote_code)

    # the outside

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._inbox.put(Work(self._set_stopping))
        if self._thread is not None:
            self._thread.join(timeout=30)

    def submit(self, sequences: list[Sequence]) -> None:
        self._inbox.put(Work(lambda: self._accept(sequences), meets_steps=True))

    def call(self, function: Callable[[], T], *, meets_steps: bool = False) -> Future[T]:
        """Run `function` in the engine's thread between two steps, unless the future is cancelled before.

        All steps are read before, unless it does not mind to meet some that are launched.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # whoever asked for it is gone
            try:
                result = function()
            except Exception as error:  # noqa: BLE001 - it belongs to one command or sequence
                future.set_exception(error)
            else:
                future.set_result(result)

        self._inbox.put(Work(run, meets_steps))
        return future

    # the thread

    def _set_stopping(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                try:
                    self._turn()
                except Exception as error:  # noqa: BLE001 - it belongs to one command or sequence
                    self.steps.start_over(error)
        except BaseException as error:
            log.exception("the engine's thread died")
            self._on_death(error)
            raise
        finally:
            self.abort_all("the engine stopped")

    def _turn(self) -> None:
        steps = self.steps
        self._take_work(wait=self.halted or self.scheduler.idle)
        if not self.halted and not self.scheduler.idle:
            started = time.perf_counter()
            steps.step()
            self.counters.busy_seconds += time.perf_counter() - started

    def _take_work(self, *, wait: bool) -> None:
        """Run what came in, and wait for something first if asked to.

        Commands meet a quiet engine, whenever they come in: all steps that are in flight land before. Newcomers and
        whoever leaves do not mind them.
        """
        if wait:
            self._do(self._awaited())
        while not self._inbox.empty():
            self._do(self._inbox.get())

    def _awaited(self) -> Work:
        """Answers first: whoever was told of an end makes one now, and settling takes the interpreter away from it."""
        self.steps.land()
        if self.steps.is_unsettled:
            try:
                return self._inbox.get(timeout=_ANSWERS_FIRST_S)
            except queue.Empty:
                self.steps.settle()
        while not self.halted and self._inbox.empty() and self.steps.decoder.capture_next():
            pass
        return self._inbox.get()

    def _do(self, work: Work) -> None:
        if not work.meets_steps:
            self.steps.quiesce()
        work.run()

    def _accept(self, sequences: list[Sequence]) -> None:
        self.counters.requests += len(sequences)
        self.scheduler.add(sequences)

    # commands, run through `call`

    def abort(self, rid: str, reason: str = "aborted by request") -> int:
        """Abort the request whose id is `rid`, all of its samples; returns how many sequences that were."""
        hit = self.scheduler.of_request(rid)
        for seq in hit:
            self._abort(seq, reason)
        return len(hit)

    def abort_all(self, reason: str = "aborted by request") -> int:
        everyone = self.scheduler.all()
        for seq in everyone:
            self._abort(seq, reason)
        return len(everyone)

    def _abort(self, seq: Sequence, reason: str) -> None:
        seq.end({"type": "abort", "message": reason})
        self.steps.leave(seq)

    def abort_sequences(self, sequences: list[Sequence], reason: str) -> None:
        """Abort exactly these, whatever else has their request id."""
        for seq in sequences:
            if seq.finish is None:
                self._abort(seq, reason)

    @property
    def halted(self) -> bool:
        """No step is made: somebody paused the engine, or memory that a step needs is released."""
        return self.paused or bool(self._released)

    def pause(self, mode: str) -> None:
        if mode == "abort":
            self.abort_all("generation was paused")
        if mode == "retract":
            for seq in reversed([*self.scheduler.running, *self.scheduler.prefilling]):
                self.scheduler.retract(seq)
        self.paused = True

    def resume(self) -> None:
        if self._unfinished is not None:
            self.mark_stale(self._unfinished)
        self._unfinished = None
        self.paused = False

    def flush_cache(self) -> None:
        self.scheduler.cache.tree.clear()

    def mark_stale(self, reason: str) -> None:
        """Refuse to generate until whole weights come: what is loaded is not what anybody published."""
        log.error("the weights are stale: %s", reason)
        self.stale = reason
        self.adapter.overwritten()
        self.abort_all(f"the weights are stale: {reason}")

    def update_weights(
        self,
        load: Callable[[], int],
        version: str | None,
        *,
        flush: bool,
        bucket: str | None = None,
        whole: bool = True,
        keeps_base: bool = False,
    ) -> int:
        """Apply `load` and take the new version; slots of running sequences now mix two sets of weights.

        No prefix that earlier weights computed is shared from now on, whatever `flush` says of an update that goes on.
        `bucket` names what was loaded of an update that goes on; `whole` weights make good whatever was wrong before.
        All but an adapter (`keeps_base`) overwrite the weights that adapters are merged into.
        """
        self._require_weights()
        try:
            copied = load()
        except HalfWritten as error:
            self.mark_stale(str(error))
            raise
        finally:
            self.runner.weights_changed()
        if not keeps_base:
            self.adapter.overwritten()
        self._unfinished = bucket
        if flush or bucket is None:
            self.flush_cache()
        for seq in [*self.scheduler.running, *self.scheduler.prefilling]:
            seq.kv_version = None
        if bucket is None and whole:
            self.stale = None
        if bucket is None and version is not None:
            self.steps.version = version
        return copied

    def _require_weights(self) -> None:
        if "weights" in self._released:
            raise BadRequest("the weights are released: call /resume_memory_occupation first")

    def update_from_files(self, paths: list[str], version: str | None, *, flush: bool) -> int:
        folder = self.options.model_path
        return self.update_weights(
            lambda: loading.load_from_files(self.views, paths, config_folder=folder),
            version,
            flush=flush,
            whole=loading.is_whole(self.views, loading.names_in(paths)),
        )

    def update_from_bytes(self, body: bytes, version: str | None, *, flush: bool) -> int:
        return self.update_weights(lambda: loading.load_from_bytes(self.views, body), version, flush=flush, whole=False)

    def update_from_folder(self, folder: str, version: str | None, *, flush: bool) -> int:
        """A model folder, or a version folder with a delta to the weights that are here now."""
        try:
            if not Path(folder).is_dir():
                raise BadRequest(f"there is no folder {shown(folder)} with safetensors files", "model_path")
            index = read_index(Path(folder))
        except (BadDelta, OSError) as cause:
            raise BadRequest(f"cannot read {shown(folder)}: {shown(str(cause))}", "model_path") from cause
        if index is not None:
            return self._update_from_delta(Path(folder), index, flush=flush)
        home, trust = self.options.model_path, self.options.trust_remote_code
        return self.update_weights(
            lambda: loading.load_from_folder(self.views, folder, home=home, trust_remote_code=trust),
            version,
            flush=flush,
        )

    def _update_from_delta(self, folder: Path, index: DeltaIndex, *, flush: bool) -> int:
        if self.stale is not None or self._unfinished is not None:
            raise Conflict(f"a delta needs whole weights to apply to: {self.stale or self._unfinished}")
        base = self.weight_version
        try:
            return self.update_weights(
                lambda: loading.load_from_delta(self.views, folder, index, version=base),
                str(index.version),
                flush=flush,
            )
        except loading.DifferentWeights as cause:
            self.mark_stale(str(cause))
            raise

    def update_from_group(self, bucket: Announced, version: str | None, *, flush: bool) -> int:
        """One bucket of a broadcast; the version is taken with the last."""
        if bucket.adapter is not None:
            return self._adapter_from_group(bucket, bucket.adapter, version, flush=flush)
        source = f"group {bucket.group_name}"
        loading.check_shapes(self.views, dict(zip(bucket.names, bucket.shapes, strict=True)), source)

        def load() -> int:
            return loading.load_tensors(self.views, self.groups.receive(bucket, self.runner.device), source)

        return self.update_weights(load, version, flush=flush, bucket=bucket.left_of(version))

    def open_shared(self, memory: DeviceMemory | HostMemory, bucket: Announced) -> OpenBucket:
        """A bucket in a trainer's memory, ready to be copied; for any thread: nothing of the model changes."""
        return self._shared.open(memory, bucket, self.views, self.runner.device)

    def update_from_shared(
        self, opened: OpenBucket, version: str | None, *, flush: bool, pause_mode: str | None
    ) -> int:
        """Copy such a bucket; the version is taken with the last. With a pause mode it is all of `pause`, update and
        `resume`; an engine that somebody else has paused stays so."""
        was_paused = self.paused
        if pause_mode is not None:
            self.pause(pause_mode)
        try:
            left = opened.bucket.left_of(version)
            return self.update_weights(lambda: opened.load(self.views), version, flush=flush, bucket=left)
        finally:
            if pause_mode is not None and not was_paused:
                self.resume()

    def _adapter_from_group(self, bucket: Announced, facts: AdapterFacts, version: str | None, *, flush: bool) -> int:
        """One bucket of an adapter's broadcast; the weights change with the last, if at all."""
        self._arriving.expect(bucket, facts)
        tensors = self.groups.receive(bucket, self.runner.device)
        adapter = self._arriving.take(bucket, tensors, facts)
        if adapter is None:
            return sum(tensor.nbytes for tensor in tensors.values())
        return self._merge(bucket.group_name, adapter, version, flush=flush)

    def load_adapter(self, name: str, folder: str, version: str | None, *, flush: bool) -> int:
        """Merge a LoRA adapter into the weights of the model's folder, in the place of the one before."""
        return self._merge(name, adapter_in(folder), version, flush=flush)

    def _merge(self, name: str, adapter: Adapter, version: str | None, *, flush: bool) -> int:
        return self.update_weights(lambda: self.adapter.load(name, adapter), version, flush=flush, keeps_base=True)

    def unload_adapter(self, name: str, version: str | None, *, flush: bool) -> int:
        """The weights of the model's folder, without the adapter."""
        if name != self.adapter.name:
            raise BadRequest(f"no adapter {shown(name)} is loaded", "lora_name")
        return self.update_weights(self.adapter.unload, version, flush=flush, keeps_base=True)

    def check_weights(self, action: str) -> dict[str, Any]:
        """`checksum`: xxh3-128 of every tensor; `shapes`: what an update may name."""
        if action == "shapes":
            return {"shapes": {name: list(tensor.shape) for name, tensor in self.views.readable().items()}}
        self._require_weights()
        from slime.models.delta.tensors import tensor_checksums  # zstandard, xxhash

        return {"checksums": tensor_checksums(self.views.readable().items())}

    def release_memory(self, tags: list[str], *, discard_weights: bool = False) -> None:
        """Give device memory back: the KV cache is dropped, weights are kept on the host or, if told so, dropped too.

        Without memory that keeps its addresses, CUDA graphs go with either.
        """
        if not self.scheduler.idle:
            raise BadRequest(
                f"{len(self.scheduler.all())} requests are running: abort them or wait before releasing memory"
            )
        for tag in tags:
            if tag == "kv_cache" and tag not in self._released:
                self.flush_cache()
                self._release_cache()
            elif tag == "weights" and tag not in self._released:
                self._release_weights(discard=discard_weights)
            self._released.add(tag)
        if self.runner.cuda:
            if self.memory is None:
                self.steps.decoder = self.runner
            torch.cuda.empty_cache()
            log.info("released %s; torch keeps %.2f GiB", tags, torch.cuda.memory_reserved() / 2**30)

    def _release_cache(self) -> None:
        if self.memory is None:
            self.runner.free_kv()
        else:
            self.runner.forget_kv()
            self.memory.release_cache()

    def _release_weights(self, *, discard: bool) -> None:
        self._discarded = discard
        if self.memory is not None:
            self.memory.release_weights(keep=not discard)
        elif self.runner.cuda:
            self.runner.model.to("cpu")

    def resume_memory(self, tags: list[str]) -> None:
        """Take memory again; discarded weights are stale until whole ones are published."""
        for tag in tags:
            if tag not in self._released:
                continue
            if tag == "weights":
                self._restore_weights()
            elif tag == "kv_cache" and self.memory is not None:
                self.memory.restore_cache()
            elif tag == "kv_cache":
                self.runner.allocate_kv(self.capacity)
            if self.runner.cuda and self.memory is None and self._released == {tag}:
                self._prepare_cuda()
            self._released.discard(tag)

    def _restore_weights(self) -> None:
        if self.memory is not None:
            self.memory.restore_weights()
        elif self.runner.cuda:
            self.runner.model.to(self.runner.device)
        if self._discarded:
            self.stale, self._discarded = "they were released without a copy", False
            self.adapter.overwritten()

    def info(self) -> dict[str, Any]:
        self.steps.settle()
        s, c = self.scheduler, self.counters
        return {
            "weight_version": self.weight_version,
            "context_length": self.context_len,
            "max_total_num_tokens": self.capacity,
            "max_running_requests": s.max_running,
            "num_running_reqs": len(s.running) + len(s.prefilling),
            "num_waiting_reqs": len(s.waiting),
            "num_used_tokens": self.capacity - s.cache.pool.free - s.cache.tree.held,
            "num_cached_tokens": s.cache.tree.held,
            "num_retractions": s.retractions,
            "paused": self.halted,
            "stale": self.stale,
            "lora_adapter": self.adapter.name,
            "released": sorted(self._released),
            "totals": vars(c).copy(),
        }
