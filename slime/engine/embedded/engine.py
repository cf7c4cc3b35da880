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
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from slime.engine.embedded.errors import BadRequest, Conflict, PartialWrite, StaleWeights, shown
from slime.engine.embedded.loader import LoadedEngine
from slime.engine.embedded.options import EngineOptions
from slime.engine.embedded.scheduler import Sequence
from slime.engine.embedded.weights import loading
from slime.engine.embedded.weights.ipc import DeviceMemory, HostMemory, OpenBucket, SharedMemory
from slime.engine.embedded.weights.lora import ArrivingAdapter, MergedAdapter, read_adapter_folder
from slime.engine.embedded.weights.process_groups import AnnouncedBucket, WeightGroups
from slime.models.delta.folder import BadDelta, read_index
from slime.models.peft_adapter import Adapter
from slime.storage.json_types import JsonObject

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class EngineTask:
    """A task from another thread; with `meets_steps` it may run while steps are in flight."""

    run: Callable[[], None]
    meets_steps: bool = False


@dataclass(frozen=True)
class PartialUpdate:
    """An update of which some buckets were copied; the engine makes no step until the others arrive."""

    version: str | None
    number: int
    count: int
    group_name: str = field(compare=False)

    def __str__(self) -> str:
        return f"only {self.number} of {self.count} buckets of version {self.version} arrived"


PAUSE_MODES = ("abort", "in_place", "retract")
_ANSWERS_FIRST_S = 0.1


class EngineCore(LoadedEngine):
    """The engine that runs in its own thread: its commands, its pauses, and the state of its weights."""

    def __init__(self, options: EngineOptions, *, on_death: Callable[[BaseException], object]) -> None:
        super().__init__(options)
        self.paused = False
        self.stale: str | None = None
        self.groups = WeightGroups()
        self._shared = SharedMemory()
        self._unfinished: PartialUpdate | None = None
        self._mended: set[str] = set()  # tensors written since the weights became stale, all by version `_mended_by`
        self._mended_by: str | None = None
        self._released: set[str] = set()
        self._discarded = False  # the weights were released without a copy
        self._on_death = on_death
        self._inbox: queue.SimpleQueue[EngineTask] = queue.SimpleQueue()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def load(self, device: str) -> None:
        """Load the model; called once before `start`."""
        super().load(device)
        self.views, o = self.model.views, self.options
        self._arriving = ArrivingAdapter(self.views)
        self.adapter = MergedAdapter(self.views, o.model_path, trust_remote_code=o.trust_remote_code)

    # called from other threads

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._inbox.put(EngineTask(self._set_stopping))
        if self._thread is not None:
            self._thread.join(timeout=30)

    def submit(self, sequences: list[Sequence]) -> None:
        self._inbox.put(EngineTask(lambda: self._accept(sequences), meets_steps=True))

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

    def _set_stopping(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
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
        if self.halted or self.scheduler.idle:
            self._do(self._awaited())
        while not self._inbox.empty():
            self._do(self._inbox.get())
        if self.halted or self.scheduler.idle:
            return
        if self.stale is not None:
            reason = f"the weights are stale: {self.stale}"
            for seq in self.scheduler.all():
                if not seq.output_ids:
                    seq.end({"type": "abort", "message": reason, "status_code": StaleWeights.status})
                    self.steps.leave(seq)
                else:
                    self._abort(seq, reason)
            return
        started = time.perf_counter()
        self.steps.step()
        self.counters.busy_seconds += time.perf_counter() - started

    def _awaited(self) -> EngineTask:
        """Wait for the next task; settle deferred work and capture graphs only when none arrives soon.

        Settling is delayed because it takes the interpreter from the threads that write the answers of sequences that
        just finished.
        """
        self.steps.land()
        if self.steps.is_unsettled:
            try:
                return self._inbox.get(timeout=_ANSWERS_FIRST_S)
            except queue.Empty:
                self.steps.settle()
        while not self.halted and self._inbox.empty() and self.steps.decoder.capture_next():
            pass
        return self._inbox.get()

    def _do(self, work: EngineTask) -> None:
        """Run a task, after the steps in flight unless it may meet them (as new and aborted requests do)."""
        if not work.meets_steps:
            self.steps.quiesce()
        work.run()

    def _accept(self, sequences: list[Sequence]) -> None:
        self.counters.requests += len(sequences)
        self.scheduler.add(sequences)

    # commands, run through `call`

    def abort(self, rid: str, reason: str = "aborted by request") -> int:
        """Abort all samples of the request with id `rid`; returns the number of its sequences."""
        hit = self.scheduler.of_request(rid)
        for seq in hit:
            self._abort(seq, reason)
        return len(hit)

    def abort_all(self, reason: str = "aborted by request") -> int:
        sequences = self.scheduler.all()
        for seq in sequences:
            self._abort(seq, reason)
        return len(sequences)

    def _abort(self, seq: Sequence, reason: str) -> None:
        seq.end({"type": "abort", "message": reason})
        self.steps.leave(seq)

    def abort_sequences(self, sequences: list[Sequence], reason: str) -> None:
        """Abort exactly these sequences; others with the same request id continue."""
        for seq in sequences:
            if seq.finish is None:
                self._abort(seq, reason)

    @property
    def halted(self) -> bool:
        """True while no step is made: the engine is paused, memory is released, or an update is unfinished."""
        return self.paused or bool(self._released) or self._unfinished is not None

    def pause(self, mode: str) -> None:
        if mode == "abort":
            self.abort_all("generation was paused")
        if mode == "retract":
            for seq in reversed([*self.scheduler.running, *self.scheduler.prefilling]):
                self.scheduler.retract(seq)
        self.paused = True

    def resume(self) -> None:
        if self._unfinished is not None:
            self.mark_stale(str(self._unfinished))
        self.paused = False

    def flush_cache(self) -> None:
        self.scheduler.cache.tree.clear()

    def mark_stale(self, reason: str) -> None:
        """Refuse to generate until whole weights arrive, since the loaded weights match no published version.

        Requests in the engine end when it would make its next step, unless an update arrives before.
        """
        log.error("the weights are stale: %s", reason)
        self.stale, self._unfinished, self._mended = reason, None, set()
        self.adapter.mark_overwritten()

    def fail_partial_update(self, group_name: str) -> None:
        """Mark the weights as stale if this group carried a part of an unfinished update."""
        if self._unfinished is not None and self._unfinished.group_name == group_name:
            self.mark_stale(str(self._unfinished))

    def check_update(self, bucket: AnnouncedBucket | None = None, version: str | None = None) -> None:
        """Refuse an update while the weights are released, and a bucket that does not follow the one before it."""
        self._require_weights()
        if bucket is None or bucket.number == 1:
            return
        if self._unfinished != PartialUpdate(version, bucket.number - 1, bucket.count, bucket.group_name):
            raise Conflict(
                f"bucket {bucket.number} of {bucket.count} of version {version} does not follow bucket "
                f"{bucket.number - 1}: send the update again from its first bucket"
            )

    def update_weights(
        self,
        load: Callable[[], int],
        version: str | None,
        *,
        flush: bool,
        names: Collection[str] | None = None,
        bucket: AnnouncedBucket | None = None,
        keeps_base: bool = False,
    ) -> int:
        """Apply `load` and set the new version; slots of running sequences then mix two sets of weights.

        Prefixes that earlier weights computed are not shared any more; `flush` says whether this bucket of an update
        already drops them, before its last one. `names` are the tensors that `load` writes (None: all of the model),
        `bucket` is their part of the update. Every update except an adapter's (`keeps_base`) overwrites the weights
        that adapters are merged into.
        """
        self.check_update(bucket, version)
        self.steps.settle()  # what aborted requests leave in the cache was computed by the old weights
        try:
            copied = load()
        except PartialWrite as error:
            self.mark_stale(str(error))
            raise
        except BadRequest:  # refused before the first tensor changed
            raise
        except Exception as error:
            self.mark_stale(f"an update failed ({type(error).__name__}: {error})")
            raise
        finally:
            self.runner.weights_changed()
        if not keeps_base:
            self.adapter.mark_overwritten()
        self._note_written(names, bucket, version)
        if flush or self._unfinished is None:
            self.flush_cache()
        for seq in [*self.scheduler.running, *self.scheduler.prefilling]:
            seq.kv_version = None
        if self._unfinished is None and version is not None:
            self.steps.version = version
        return copied

    def _require_weights(self) -> None:
        if "weights" in self._released:
            raise BadRequest("the weights are released: call /resume_memory_occupation first")

    def _note_written(self, names: Collection[str] | None, bucket: AnnouncedBucket | None, version: str | None) -> None:
        """Record what an update wrote, and end staleness once one version wrote every tensor since it began.

        Each update without a version counts as a version of its own.
        """
        begins = bucket is None or bucket.number == 1
        if self._unfinished is not None and begins:
            self.mark_stale(str(self._unfinished))  # its other buckets cannot follow any more
        if bucket is None or bucket.is_last:
            self._unfinished = None
        else:
            self._unfinished = PartialUpdate(version, bucket.number, bucket.count, bucket.group_name)
        if self.stale is None:
            return
        if version != self._mended_by or (version is None and begins):
            self._mended, self._mended_by = set(), version
        self._mended |= set(names or ())
        if self._unfinished is None and (names is None or loading.is_whole(self.views, self._mended)):
            self.stale = None

    def update_from_files(self, paths: list[str], version: str | None, *, flush: bool) -> int:
        folder = self.options.model_path
        return self.update_weights(
            lambda: loading.load_from_files(self.views, paths, config_folder=folder),
            version,
            flush=flush,
            names=loading.names_in(paths),
        )

    def update_from_bytes(self, body: bytes, version: str | None, *, flush: bool) -> int:
        tensors = loading.tensors_in(body)
        return self._update_from_tensors(tensors, "the request body", version, flush=flush)

    def _update_from_tensors(
        self,
        tensors: Mapping[str, torch.Tensor],
        source: str,
        version: str | None,
        *,
        flush: bool,
        bucket: AnnouncedBucket | None = None,
    ) -> int:
        return self.update_weights(
            lambda: loading.load_tensors(self.views, tensors, source),
            version,
            flush=flush,
            names=tensors.keys(),
            bucket=bucket,
        )

    def update_from_folder(self, folder: str, version: str | None, *, flush: bool) -> int:
        """Load a model folder, or apply the delta of a version folder; weights that are not its base become stale."""
        try:
            if not Path(folder).is_dir():
                raise BadRequest(f"there is no folder {shown(folder)} with safetensors files", "model_path")
            index = read_index(Path(folder))
        except (BadDelta, OSError) as cause:
            raise BadRequest(f"cannot read {shown(folder)}: {shown(str(cause))}", "model_path") from cause
        if index is None:
            home, trust = self.options.model_path, self.options.trust_remote_code
            return self.update_weights(
                lambda: loading.load_from_folder(self.views, folder, home=home, trust_remote_code=trust),
                version,
                flush=flush,
            )
        if self.stale is not None or self._unfinished is not None:
            raise Conflict(f"a delta needs whole weights to apply to: {self.stale or self._unfinished}")
        base = self.weight_version
        try:
            return self.update_weights(
                lambda: loading.load_from_delta(self.views, Path(folder), index, version=base),
                str(index.version),
                flush=flush,
            )
        except loading.DifferentWeights as cause:
            self.mark_stale(str(cause))
            raise

    def expect_from_group(self, bucket: AnnouncedBucket, version: str | None) -> None:
        """Refuse a bucket of a broadcast that would not be copied, before it is received."""
        if bucket.adapter is not None:
            self.check_update()
            self._arriving.expect(bucket, bucket.adapter)
        else:
            self.check_update(bucket, version)
            loading.check_shapes(self.views, bucket.tensor_shapes, bucket.source)

    def update_from_group(
        self, bucket: AnnouncedBucket, tensors: Mapping[str, torch.Tensor], version: str | None, *, flush: bool
    ) -> int:
        """Copy one received bucket of a broadcast; the version changes with the last bucket.

        Buckets of an adapter are collected: the weights change with the last of them, if at all.
        """
        if bucket.adapter is None:
            return self._update_from_tensors(tensors, bucket.source, version, flush=flush, bucket=bucket)
        adapter = self._arriving.take(bucket, tensors, bucket.adapter)
        if adapter is None:
            return sum(tensor.nbytes for tensor in tensors.values())
        return self._merge(bucket.group_name, adapter, version, flush=flush)

    def open_shared(self, memory: DeviceMemory | HostMemory, bucket: AnnouncedBucket) -> OpenBucket:
        """Open a bucket in a trainer's memory for copying; any thread may call this: the model does not change."""
        return self._shared.open(memory, bucket, self.views, self.runner.device)

    def update_from_shared(
        self, opened: OpenBucket, version: str | None, *, flush: bool, pause_mode: str | None
    ) -> int:
        """Copy an opened bucket; the version changes with the last bucket.

        With a pause mode it also does `pause` before and `resume` after; an engine that was paused before stays so.
        """
        was_paused = self.paused
        if pause_mode is not None:
            self.pause(pause_mode)
        try:
            bucket = opened.bucket
            return self.update_weights(
                lambda: opened.load(self.views), version, flush=flush, names=bucket.names, bucket=bucket
            )
        finally:
            if pause_mode is not None and not was_paused:
                self.resume()

    def load_adapter(self, name: str, folder: str, version: str | None, *, flush: bool) -> int:
        """Merge a LoRA adapter into the weights of the model's folder; it replaces the adapter before."""
        return self._merge(name, read_adapter_folder(folder), version, flush=flush)

    def _merge(self, name: str, adapter: Adapter, version: str | None, *, flush: bool) -> int:
        return self.update_weights(lambda: self.adapter.load(name, adapter), version, flush=flush, keeps_base=True)

    def unload_adapter(self, name: str, version: str | None, *, flush: bool) -> int:
        """Restore the weights of the model's folder, without the adapter."""
        if name != self.adapter.name:
            raise BadRequest(f"no adapter {shown(name)} is loaded", "lora_name")
        return self.update_weights(self.adapter.unload, version, flush=flush, keeps_base=True)

    def check_weights(self, action: str) -> JsonObject:
        """Return the xxh3-128 of every tensor (`checksum`) or the tensors that an update may name (`shapes`)."""
        if action == "shapes":
            return {"shapes": self.views.shapes()}
        self._require_weights()
        from slime.models.delta.apply import tensor_checksums  # zstandard, xxhash

        return {"checksums": tensor_checksums(self.views.readable().items())}

    def release_memory(self, tags: list[str], *, discard_weights: bool = False) -> None:
        """Release device memory: the KV cache is dropped, weights are kept on the host or (`discard_weights`) dropped.

        CUDA graphs have no memory of their own to release: where memory keeps its addresses they stay valid, else they
        are dropped when either is released, and captured again when both are back.
        """
        if not self.scheduler.idle:
            raise BadRequest(
                f"{len(self.scheduler.all())} requests are running: abort them or wait before releasing memory"
            )
        for tag in ("kv_cache", "weights"):
            if tag not in tags or tag in self._released:
                continue
            if tag == "kv_cache":
                self.flush_cache()
                if self.memory is None:
                    self.runner.free_kv()
                else:
                    self.runner.forget_kv()
                    self.memory.release_cache()
            else:
                self._release_weights(discard=discard_weights)
            self._released.add(tag)
        if self.runner.cuda:
            if self.memory is None and self._released:
                self.steps.decoder = self.runner
            torch.cuda.empty_cache()
            log.info("released %s; torch keeps %.2f GiB", tags, torch.cuda.memory_reserved() / 2**30)

    def _release_weights(self, *, discard: bool) -> None:
        self._discarded = discard
        if self.memory is not None:
            self.memory.release_weights(keep=not discard)
        elif self.runner.cuda:
            self.runner.model.to("cpu")

    def resume_memory(self, tags: list[str]) -> None:
        """Allocate the memory again; discarded weights are stale until whole ones are published."""
        for tag in tags:
            if tag not in self._released:
                continue
            if tag == "weights":
                if self.memory is not None:
                    self.memory.restore_weights()
                elif self.runner.cuda:
                    self.runner.model.to(self.runner.device)
                if self._discarded:
                    self._discarded = False
                    self.mark_stale("they were released without a copy")
            elif self.memory is not None:
                self.memory.restore_cache()
            else:
                self.runner.allocate_kv(self.capacity)
            if self.runner.cuda and self.memory is None and self._released == {tag}:
                self._prepare_cuda()
            self._released.discard(tag)

    def info(self) -> JsonObject:
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
