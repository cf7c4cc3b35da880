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
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from slime.engine.embedded.errors import BadRequest, Conflict, HalfWritten, StaleWeights, shown
from slime.engine.embedded.loader import LoadedEngine
from slime.engine.embedded.options import EngineOptions
from slime.engine.embedded.scheduler import Sequence
from slime.engine.embedded.weights import loading
from slime.engine.embedded.weights.ipc import DeviceMemory, HostMemory, OpenBucket, SharedMemory
from slime.engine.embedded.weights.lora import ArrivingAdapter, MergedAdapter, adapter_in
from slime.engine.embedded.weights.process_groups import Announced, WeightGroups
from slime.models.delta.folder import BadDelta, DeltaIndex, read_index
from slime.models.peft_adapter import Adapter

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """What another thread wants done; `meets_steps`: while steps are in flight, too."""

    run: Callable[[], None]
    meets_steps: bool = False


@dataclass(frozen=True)
class Unfinished:
    """An update of which some buckets have been copied; the engine makes no step before the others come."""

    version: str | None
    number: int
    count: int
    group_name: str = field(compare=False)

    def __str__(self) -> str:
        return f"only {self.number} of {self.count} buckets of version {self.version} came"


PAUSE_MODES = ("abort", "in_place", "retract")
_ANSWERS_FIRST_S = 0.1


class EngineCore(LoadedEngine):
    def __init__(self, options: EngineOptions, *, on_death: Callable[[BaseException], object]) -> None:
        super().__init__(options)
        self.paused = False
        self.stale: str | None = None
        self.groups = WeightGroups()
        self._shared = SharedMemory()
        self._unfinished: Unfinished | None = None
        self._mended: set[str] = set()  # tensors written since the weights went stale, all by the version `_mended_by`
        self._mended_by: str | None = None
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
        self._take_work(wait=self.halted or self.scheduler.idle)
        if self.halted or self.scheduler.idle:
            return
        if self.stale is not None:
            self._refuse_all(f"the weights are stale: {self.stale}")
            return
        started = time.perf_counter()
        self.steps.step()
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

    def _refuse_all(self, reason: str) -> None:
        """End every request: with the tokens that it has, or with status 503 where it has none."""
        for seq in self.scheduler.all():
            if not seq.output_ids:
                seq.end({"type": "abort", "message": reason, "status_code": StaleWeights.status})
                self.steps.leave(seq)
            else:
                self._abort(seq, reason)

    @property
    def halted(self) -> bool:
        """No step is made: the engine is paused, memory that a step needs is released, or an update is unfinished."""
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
        """Refuse to generate until whole weights come: what is loaded is not what anybody published.

        Requests that are here end when the engine would make its next step; an update that comes before saves them.
        """
        log.error("the weights are stale: %s", reason)
        self.stale, self._unfinished, self._mended = reason, None, set()
        self.adapter.overwritten()

    def break_off(self, group_name: str) -> None:
        """Nothing more comes through this group: an update of which it brought a part cannot be finished."""
        if self._unfinished is not None and self._unfinished.group_name == group_name:
            self.mark_stale(str(self._unfinished))

    def check_update(self, bucket: Announced | None = None, version: str | None = None) -> None:
        """Refuse an update for which there is no memory, and a bucket that does not follow the one before it."""
        self._require_weights()
        if bucket is None or bucket.number == 1:
            return
        if self._unfinished != Unfinished(version, bucket.number - 1, bucket.count, bucket.group_name):
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
        bucket: Announced | None = None,
        keeps_base: bool = False,
    ) -> int:
        """Apply `load` and take the new version; slots of running sequences now mix two sets of weights.

        No prefix that earlier weights computed is shared from now on, whatever `flush` says of an update that goes on.
        `names` are the tensors that `load` writes (None: all of the model), `bucket` is the part of an update that they
        are. All but an adapter (`keeps_base`) overwrite the weights that adapters are merged into.
        """
        self.check_update(bucket, version)
        self.steps.settle()  # what aborted requests leave in the cache is of the weights before
        try:
            copied = load()
        except HalfWritten as error:
            self.mark_stale(str(error))
            raise
        except BadRequest:  # a refusal, before the first tensor changed
            raise
        except Exception as error:
            self.mark_stale(f"an update failed ({type(error).__name__}: {error})")
            raise
        finally:
            self.runner.weights_changed()
        if not keeps_base:
            self.adapter.overwritten()
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

    def _note_written(self, names: Collection[str] | None, bucket: Announced | None, version: str | None) -> None:
        """Weights that are stale are good again once one version has written every tensor since they went stale.
        Updates without a version may be of different ones."""
        begins = bucket is None or bucket.number == 1
        if self._unfinished is not None and begins:
            self.mark_stale(str(self._unfinished))  # the rest of it can no longer come
        if bucket is None or bucket.is_last:
            self._unfinished = None
        else:
            self._unfinished = Unfinished(version, bucket.number, bucket.count, bucket.group_name)
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
        bucket: Announced | None = None,
    ) -> int:
        return self.update_weights(
            lambda: loading.load_tensors(self.views, tensors, source),
            version,
            flush=flush,
            names=tensors.keys(),
            bucket=bucket,
        )

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

    def expect_from_group(self, bucket: Announced, version: str | None) -> None:
        """Refuse a bucket of a broadcast that would not be copied, before it is received."""
        if bucket.adapter is not None:
            self.check_update()
            self._arriving.expect(bucket, bucket.adapter)
        else:
            self.check_update(bucket, version)
            loading.check_shapes(self.views, bucket.tensor_shapes, bucket.source)

    def update_from_group(
        self, bucket: Announced, tensors: Mapping[str, torch.Tensor], version: str | None, *, flush: bool
    ) -> int:
        """Copy one bucket of a broadcast, which was received; the version is taken with the last."""
        if bucket.adapter is not None:
            return self._adapter_from_group(bucket, tensors, version, flush=flush)
        return self._update_from_tensors(tensors, bucket.source, version, flush=flush, bucket=bucket)

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
            bucket = opened.bucket
            return self.update_weights(
                lambda: opened.load(self.views), version, flush=flush, names=bucket.names, bucket=bucket
            )
        finally:
            if pause_mode is not None and not was_paused:
                self.resume()

    def _adapter_from_group(
        self, bucket: Announced, tensors: Mapping[str, torch.Tensor], version: str | None, *, flush: bool
    ) -> int:
        """Keep one bucket of an adapter's broadcast; the weights change with the last, if at all."""
        assert bucket.adapter is not None
        adapter = self._arriving.take(bucket, tensors, bucket.adapter)
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
            return {"shapes": self.views.shapes()}
        self._require_weights()
        from slime.models.delta.apply import tensor_checksums  # zstandard, xxhash

        return {"checksums": tensor_checksums(self.views.readable().items())}

    def release_memory(self, tags: list[str], *, discard_weights: bool = False) -> None:
        """Give device memory back: the KV cache is dropped, weights are kept on the host or, if told so, dropped too.

        CUDA graphs have no memory of their own to give: where memory keeps its addresses they stay, else they go and
        come with either.
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
                self._release_cache()
            else:
                self._release_weights(discard=discard_weights)
            self._released.add(tag)
        if self.runner.cuda:
            if self.memory is None and self._released:
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
            elif self.memory is not None:
                self.memory.restore_cache()
            else:
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
            self._discarded = False
            self.mark_stale("they were released without a copy")

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
