"""Merges a LoRA adapter into the weights of the served model, in place.

Invariant: after `load` the weights are those of the model's folder merged with this adapter only, for any weights
before: bit for bit the whole weights that the adapter's trainer would send. Names and shapes of all pairs are checked
before the first weight changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path

import torch

from slime.engine.embedded.errors import BadRequest, Conflict, PartialWrite, shown
from slime.engine.embedded.weights import loading
from slime.engine.embedded.weights.parameter_views import FolderViews
from slime.engine.embedded.weights.process_groups import AnnouncedBucket
from slime.models.peft_adapter import (
    Adapter,
    AdapterConfig,
    BadAdapter,
    merge_lora,
    read_adapter,
    split_tensor_name,
)


class MergedAdapter:
    """The merged adapter, and the base weights of all layers that were ever merged, kept on the host."""

    def __init__(self, views: FolderViews, folder: str, *, trust_remote_code: bool) -> None:
        self._views = views
        self._folder = folder
        self._trust_remote_code = trust_remote_code
        self._own_dtype = self._dtype = next(views.model.parameters()).dtype
        self._base: dict[str, torch.Tensor] = {}
        self._merged: set[str] = set()
        self._is_overwritten = False
        self.name: str | None = None

    def mark_overwritten(self) -> None:
        """Record that the model's base weights may not be those of its folder any more."""
        self._is_overwritten, self.name = True, None

    @torch.no_grad()
    def load(self, name: str, adapter: Adapter) -> int:
        """Merge `adapter`, which replaces the one before; returns its bytes.

        The base weights are those of the folder in the dtype that the adapter is trained with; they are read from the
        folder again if that is not the model's own dtype, or if the base was overwritten.
        """
        shapes = adapter.weight_shapes
        loading.check_shapes(self._views, shapes, "the adapter")
        dtype = adapter.facts.base_dtype or self._own_dtype
        fresh = shapes.keys() - self._base.keys()
        if self._is_overwritten or dtype != self._dtype or (fresh and dtype != self._own_dtype):
            self._reload_base(shapes.keys(), dtype)
        else:
            current = self._views.targets(shapes.keys())
            self._base |= {name: _host_copy(current[name], pin=current[name].is_cuda) for name in fresh}
        targets = self._views.targets(shapes)
        try:
            self._restore(self._merged - shapes.keys())
            self._merged |= shapes.keys()
            for module, (a, b) in adapter.pairs.items():
                target, base = targets[f"{module}.weight"], self._base[f"{module}.weight"]
                base, a, b = (tensor.to(target.device, non_blocking=True) for tensor in (base, a, b))
                target.copy_(merge_lora(base, a, b, scale=adapter.facts.scale, dtype=target.dtype))
        except RuntimeError as cause:
            self.mark_overwritten()
            raise PartialWrite(f"the adapter was merged only in part: {cause}") from cause
        self.name = name
        return adapter.nbytes

    @torch.no_grad()
    def unload(self) -> int:
        """Restore the weights of the folder; returns the bytes restored."""
        self.name = None
        if self._is_overwritten or self._dtype != self._own_dtype:
            return self._reload_base(set(), self._own_dtype)
        return self._restore(set(self._merged))

    def _restore(self, names: set[str]) -> int:
        targets = self._views.targets(names)
        for name in names:
            targets[name].copy_(self._base[name])
        self._merged -= names
        return sum(targets[name].nbytes for name in names)

    def _reload_base(self, names: Set[str], dtype: torch.dtype) -> int:
        """Read the folder in `dtype` into the model, and keep the weights of `names` on the host."""
        problem = "the base weights of the adapter cannot be read: "
        model = loading.read_model(self._folder, dtype, trust_remote_code=self._trust_remote_code, problem=problem)
        self.mark_overwritten()
        copied = loading.load_tensors(self._views, self._views.weights_like(model), self._folder)
        targets, pin = FolderViews(model).targets(names), next(self._views.model.parameters()).is_cuda
        self._base = {name: _host_copy(targets[name], pin=pin) for name in names}
        self._merged, self._dtype, self._is_overwritten = set(), dtype, False
        return copied


class ArrivingAdapter:
    """The tensors of an adapter that arrives in buckets through a process group; complete with the last one."""

    def __init__(self, views: FolderViews) -> None:
        self._views = views
        self._tensors: dict[str, torch.Tensor] = {}
        self._next = 1

    def expect(self, bucket: AnnouncedBucket, facts: AdapterConfig) -> None:
        """Refuse a bucket that does not follow the one before, or that has a tensor without a matching weight."""
        if bucket.number == 1:
            self._tensors, self._next = {}, 1
        self._require_next(bucket)
        try:
            modules = [split_tensor_name(name) for name in bucket.names]
        except BadAdapter as cause:
            raise BadRequest(str(cause), "names") from cause
        targets = self._views.targets({f"{module}.weight" for module, _ in modules})
        for (module, half), name, shape in zip(modules, bucket.names, bucket.shapes, strict=True):
            target = targets.get(f"{module}.weight")
            if target is None or target.dim() != 2:
                raise BadRequest(f"the adapter is for {module}, and this model has no such layer", "names")
            fits = (facts.rank, target.shape[1]) if half == "A" else (target.shape[0], facts.rank)
            if shape != fits:
                raise BadRequest(f"{name} has shape {shape}, but this model needs {fits}", "shapes")

    def take(
        self, bucket: AnnouncedBucket, tensors: Mapping[str, torch.Tensor], facts: AdapterConfig
    ) -> Adapter | None:
        """Keep the tensors of a bucket; returns the adapter with the last one."""
        self._require_next(bucket)  # another update may have begun while this one arrived
        self._tensors |= tensors
        self._next += 1
        if not bucket.is_last:
            return None
        whole, self._tensors, self._next = self._tensors, {}, 1
        try:
            return Adapter.from_tensors(facts, whole)
        except BadAdapter as cause:
            raise BadRequest(str(cause)) from cause

    def _require_next(self, bucket: AnnouncedBucket) -> None:
        if bucket.number != self._next:
            raise Conflict(f"bucket {bucket.number} of {bucket.count} arrived instead of bucket {self._next}")


def read_adapter_folder(folder: str) -> Adapter:
    """Read the adapter of a folder in PEFT's format."""
    try:
        found = read_adapter(Path(folder)) if Path(folder).is_dir() else None
    except (BadAdapter, OSError) as cause:
        raise BadRequest(f"cannot load the adapter: {cause}", "lora_path") from cause
    if found is None:
        raise BadRequest(f"there is no folder {shown(folder)} with an adapter", "lora_path")
    return found


def _host_copy(tensor: torch.Tensor, *, pin: bool) -> torch.Tensor:
    """Copy a tensor to host memory, pinned if a GPU will read it."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin).copy_(tensor)
