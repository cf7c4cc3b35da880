"""Updates of the served weights, and whether these match a published version.

All functions run in the engine's thread, between two steps, except `shared.open`. Invariant: weights that match no
published version are stale: the engine generates nothing until one version wrote every tensor. An adapter is merged
into weights of the model's folder only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from slime.engine.embedded.errors import BadRequest, Conflict, PartialWrite, shown
from slime.engine.embedded.loader import LoadedEngine
from slime.engine.embedded.options import EngineOptions
from slime.engine.embedded.weights import loading
from slime.engine.embedded.weights.ipc import SharedMemory
from slime.engine.embedded.weights.lora import ArrivingAdapter, MergedAdapter, read_adapter_folder
from slime.engine.embedded.weights.process_groups import AnnouncedBucket
from slime.models.delta.folder import BadDelta, read_index
from slime.storage.json_types import JsonObject

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PartialUpdate:
    """An update of which some buckets were copied; the engine makes no step until the others arrive."""

    version: str | None
    number: int
    count: int
    group_name: str = field(compare=False)

    def __str__(self) -> str:
        return f"only {self.number} of {self.count} buckets of version {self.version} arrived"


class WeightUpdates:
    """The weights of a loaded engine: their updates, their adapter, and their memory while it is released."""

    def __init__(self, engine: LoadedEngine, options: EngineOptions) -> None:
        self._engine = engine
        self._folder, self._trust_remote_code = options.model_path, options.trust_remote_code
        self.views = engine.model.views
        self.adapter = MergedAdapter(self.views, self._folder, trust_remote_code=self._trust_remote_code)
        self.stale: str | None = None
        self.unfinished: PartialUpdate | None = None
        self._arriving = ArrivingAdapter(self.views)
        self.shared = SharedMemory(self.views, engine.runner.device)
        self._mended: set[str] = set()  # tensors written since the weights became stale, all by version `_mended_by`
        self._mended_by: str | None = None
        self.is_released = False
        self._is_discarded = False  # released without a copy

    def mark_stale(self, reason: str) -> None:
        """Refuse to generate until whole weights arrive, since the loaded weights match no published version.

        Requests in the engine end when it would make its next step, unless an update arrives before.
        """
        log.error("the weights are stale: %s", reason)
        self.stale, self.unfinished, self._mended = reason, None, set()
        self.adapter.mark_overwritten()

    def fail_partial_update(self, group_name: str) -> None:
        """Mark the weights as stale if this group carried a part of an unfinished update."""
        if self.unfinished is not None and self.unfinished.group_name == group_name:
            self.mark_stale(str(self.unfinished))

    def check_update(self, bucket: AnnouncedBucket | None = None, version: str | None = None) -> None:
        """Refuse an update while the weights are released, and a bucket that does not follow the one before it."""
        self._require_memory()
        if bucket is None or bucket.number == 1:
            return
        if self.unfinished != PartialUpdate(version, bucket.number - 1, bucket.count, bucket.group_name):
            raise Conflict(
                f"bucket {bucket.number} of {bucket.count} of version {version} does not follow bucket "
                f"{bucket.number - 1}: send the update again from its first bucket"
            )

    def apply(
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
        engine = self._engine
        self.check_update(bucket, version)
        engine.steps.settle()  # what aborted requests leave in the cache was computed by the old weights
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
            engine.runner.weights_changed()
        if not keeps_base:
            self.adapter.mark_overwritten()
        begins = bucket is None or bucket.number == 1
        if self.unfinished is not None and begins:
            self.mark_stale(str(self.unfinished))  # its other buckets cannot follow any more
        if bucket is None or bucket.is_last:
            self.unfinished = None
        else:
            self.unfinished = PartialUpdate(version, bucket.number, bucket.count, bucket.group_name)
        if self.stale is not None:  # until one version wrote every tensor; an update without one counts as its own
            if version != self._mended_by or (version is None and begins):
                self._mended, self._mended_by = set(), version
            self._mended |= set(names or ())
            if self.unfinished is None and (names is None or loading.is_whole(self.views, self._mended)):
                self.stale = None
        if flush or self.unfinished is None:
            engine.scheduler.cache.tree.clear()
        for seq in [*engine.scheduler.running, *engine.scheduler.prefilling]:
            seq.kv_version = None
        if self.unfinished is None and version is not None:
            engine.steps.version = version
        return copied

    def _require_memory(self) -> None:
        if self.is_released:
            raise BadRequest("the weights are released: call /resume_memory_occupation first")

    def update_from_files(self, paths: list[str], version: str | None, *, flush: bool) -> int:
        return self.apply(
            lambda: loading.load_from_files(self.views, paths, config_folder=self._folder),
            version,
            flush=flush,
            names=loading.names_in(paths),
        )

    def update_from_bytes(self, body: bytes, version: str | None, *, flush: bool) -> int:
        tensors = loading.tensors_in(body)
        return self.apply(
            lambda: loading.load_tensors(self.views, tensors, "the request body"), version, flush=flush, names=tensors
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
            home, trust = self._folder, self._trust_remote_code
            return self.apply(
                lambda: loading.load_from_folder(self.views, folder, home=home, trust_remote_code=trust),
                version,
                flush=flush,
            )
        if self.stale is not None or self.unfinished is not None:
            raise Conflict(f"a delta needs whole weights to apply to: {self.stale or self.unfinished}")
        base = self._engine.steps.version
        try:
            return self.apply(
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
            return self.apply(
                lambda: loading.load_tensors(self.views, tensors, bucket.source),
                version,
                flush=flush,
                names=bucket.names,
                bucket=bucket,
            )
        adapter = self._arriving.take(bucket, tensors, bucket.adapter)
        if adapter is None:
            return sum(tensor.nbytes for tensor in tensors.values())
        return self.apply(lambda: self.adapter.load(bucket.group_name, adapter), version, flush=flush, keeps_base=True)

    def load_adapter(self, name: str, folder: str, version: str | None, *, flush: bool) -> int:
        """Merge a LoRA adapter into the weights of the model's folder; it replaces the adapter before."""
        adapter = read_adapter_folder(folder)
        return self.apply(lambda: self.adapter.load(name, adapter), version, flush=flush, keeps_base=True)

    def unload_adapter(self, name: str, version: str | None, *, flush: bool) -> int:
        """Restore the weights of the model's folder, without the adapter."""
        if name != self.adapter.name:
            raise BadRequest(f"no adapter {shown(name)} is loaded", "lora_name")
        return self.apply(self.adapter.unload, version, flush=flush, keeps_base=True)

    def check(self, action: str) -> JsonObject:
        """Return the xxh3-128 of every tensor (`checksum`) or the tensors that an update may name (`shapes`)."""
        if action == "shapes":
            return {"shapes": self.views.shapes()}
        self._require_memory()
        from slime.models.delta.apply import tensor_checksums  # zstandard, xxhash

        return {"checksums": tensor_checksums(self.views.readable().items())}

    def release(self, *, discard: bool) -> None:
        """Release their memory; they are kept on the host unless `discard`."""
        memory, runner = self._engine.memory, self._engine.runner
        self._is_discarded = discard
        if memory is not None:
            memory.release_weights(keep=not discard)
        elif runner.cuda:
            runner.model.to("cpu")
        self.is_released = True

    def restore(self) -> None:
        """Allocate their memory again; discarded weights are stale until whole ones are published."""
        memory, runner = self._engine.memory, self._engine.runner
        if memory is not None:
            memory.restore_weights()
        elif runner.cuda:
            runner.model.to(runner.device)
        if self._is_discarded:
            self._is_discarded = False
            self.mark_stale("they were released without a copy")
