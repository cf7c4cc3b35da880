"""The engine's device memory, which is released while a trainer on the same GPU needs it, and its KV cache budget.

Invariant: weights and KV cache keep their addresses while their memory is released, so graphs and compiled code are
made once. Nothing reads or writes them during that time; restored memory is empty unless a copy was kept. The KV cache
takes at most --mem-fraction of the memory that is free after loading the weights, and leaves what the steps themselves
need: graphs, activations of the longest extend step, logits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf

import psutil
import torch
from torch import nn

from slime.cluster.memory.cuda_driver import CudaDriverError
from slime.cluster.memory.regions import DeviceRegion, align_up, pinned_bytes
from slime.engine.embedded.errors import Conflict
from slime.engine.embedded.model.runner import ModelRunner
from slime.engine.embedded.options import EngineOptions
from slime.errors import UserError
from slime.storage.json_types import JsonMapping

log = logging.getLogger(__name__)

_CPU_KV_BYTES = 2 << 30
_LOGITS_KEPT = 8  # fp32 logits of a whole batch that graphs of all sizes and sampling take together


class EngineMemory:
    """The two memory regions of one model on a GPU: its parameters, and the cache of its running sequences."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._weights = DeviceRegion(device)
        self._cache = DeviceRegion(device)
        self._kept: torch.Tensor | None = None  # the weights on the host, while they are released
        self._backup: torch.Tensor | None = None  # the buffer for it, allocated once

    @classmethod
    def on(cls, device: torch.device) -> EngineMemory | None:
        """Create it; None where the driver lacks such memory: then torch owns it, and graphs are captured each time."""
        if device.type != "cuda":
            return None
        try:
            return cls(device)
        except CudaDriverError as reason:
            log.warning("restored memory has new addresses, so CUDA graphs are captured again each time: %s", reason)
            return None

    # the weights

    @torch.no_grad()
    def adopt(self, model: nn.Module, together: Iterable[SequenceOf[str]] = ()) -> None:
        """Move all parameters into this memory, from any device; those that share memory still share it afterwards.

        The parameters of each group in `together` become contiguous.
        """
        own = dict(model.named_parameters(remove_duplicate=False))
        groups = [[own[name] for name in names] for names in together]
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
        self._weights.range.prepare(sum(align_up(storage.nbytes()) for storage in storages.values()))
        _move_contiguous(groups, lambda size: self._weights.empty((size,), torch.uint8))
        grouped = {id(p) for group in groups for p in group}
        moved: dict[int, torch.Tensor] = {}
        for parameter in model.parameters():
            if id(parameter) in grouped:
                continue
            storage = parameter.untyped_storage()
            address = storage.data_ptr()
            if address not in moved:
                moved[address] = self._weights.empty((storage.nbytes(),), torch.uint8)
                moved[address].copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
            flat = moved[address].view(parameter.dtype)
            parameter.data = flat.as_strided(parameter.shape, parameter.stride(), parameter.storage_offset())

    def place(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, together: Iterable[SequenceOf[str]] = ()
    ) -> dict[str, torch.Tensor]:
        """Allocate tensors of one dtype, without values; those of each group in `together` are contiguous."""
        groups = [list(names) for names in together]
        grouped = {name for names in groups for name in names}
        groups += [[name] for name in shapes if name not in grouped]
        sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
        totals = [sum(sizes[name] for name in names) for names in groups]
        self._weights.range.prepare(sum(align_up(total) for total in totals))
        placed: dict[str, torch.Tensor] = {}
        for names, total in zip(groups, totals, strict=True):
            room = self._weights.empty((total,), torch.uint8)
            for name, part in zip(names, room.split([sizes[name] for name in names]), strict=True):
                placed[name] = part.view(dtype).view(shapes[name])
        return placed

    def release_weights(self, *, keep: bool) -> None:
        """Release the memory of the weights; with `keep`, a copy on the host restores them later."""
        if keep:
            held = self._weights.contents()
            if self._backup is None:
                self._backup = pinned_bytes(held.numel())
            self._kept = self._backup.copy_(held)
        self._weights.release()

    def restore_weights(self) -> None:
        """Allocate their memory again; their values are restored only if a copy was kept."""
        self._take_back(self._weights, "weights")
        if self._kept is not None:
            self._weights.contents().copy_(self._kept)
            self._kept = None

    # the KV cache

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a tensor of the cache."""
        return self._cache.empty(shape, dtype).zero_()

    def release_cache(self) -> None:
        self._cache.release()

    def restore_cache(self) -> None:
        """Allocate the memory of the cache again, with zeros."""
        self._take_back(self._cache, "KV cache")
        self._cache.contents().zero_()

    def _take_back(self, region: DeviceRegion, what: str) -> None:
        try:
            region.take_back()
        except CudaDriverError as reason:
            free, needed = torch.cuda.mem_get_info(self._device)[0], region.range.full_bytes
            raise Conflict(
                f"there is no memory for the {what}: {needed / 2**30:.1f} GiB are needed and {free / 2**30:.1f} are "
                f"free on this GPU ({reason}). Release the trainer's memory first, or lower --mem-fraction"
            ) from reason


@torch.no_grad()
def make_contiguous(model: nn.Module, together: Iterable[SequenceOf[str]]) -> None:
    """Make the parameters of each group contiguous, in torch's own memory (without `EngineMemory`)."""
    own = dict(model.named_parameters(remove_duplicate=False))
    device = next(model.parameters()).device
    _move_contiguous(
        [[own[name] for name in names] for names in together],
        lambda size: torch.empty(size, dtype=torch.uint8, device=device),
    )


def _move_contiguous(groups: list[list[nn.Parameter]], room: Callable[[int], torch.Tensor]) -> None:
    for group in groups:
        sizes = [parameter.nbytes for parameter in group]
        for parameter, part in zip(group, room(sum(sizes)).split(sizes), strict=True):
            parameter.data = part.view(parameter.dtype).view(parameter.shape).copy_(parameter)


def affordable_slots(runner: ModelRunner, options: EngineOptions, facts: JsonMapping, context_len: int) -> int:
    """Return the number of KV slots that the memory has room for, at most what all running requests can fill.

    `facts` is the text model's config.
    """
    if runner.cuda:
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        kept = step_bytes(runner.dtype, options, facts)
        budget = min(int(free * options.mem_fraction), free - kept)
        reason = f" in addition to the {kept / 2**30:.1f} GiB that steps need"
    else:
        budget, reason = int(psutil.virtual_memory().available * options.mem_fraction), ""
    states = runner.states.total_bytes(runner.dtype)
    if states and states > budget:
        raise UserError(
            f"the states of {options.max_running_requests} running requests take {states / 2**30:.1f} GiB, and "
            f"{max(budget, 0) / 2**30:.1f} are available{reason}: lower --max-running-requests, or raise --mem-fraction"
        )
    budget = budget - states if runner.cuda else min(budget - states, _CPU_KV_BYTES)
    if runner.cuda and budget < runner.kv_bytes_per_token():
        raise UserError(
            f"no memory is left for the KV cache{reason}: lower --chunked-prefill-size or --max-running-requests, "
            "raise --mem-fraction, or free memory on this GPU"
        )
    wanted = options.max_running_requests * context_len
    return max(1, min(wanted, budget // runner.kv_bytes_per_token()))


def step_bytes(dtype: torch.dtype, options: EngineOptions, facts: JsonMapping) -> int:
    """Return an upper limit of the bytes that steps need: activations of an extend step, and logits."""
    hidden, heads = facts["hidden_size"], facts["num_attention_heads"]
    inner = max(facts.get("intermediate_size") or 0, 4 * hidden)
    wide = heads * (facts.get("head_dim") or hidden // heads)
    token = dtype.itemsize * (4 * inner + 6 * wide) + 4 * 4 * hidden  # norms compute in fp32
    return options.chunked_prefill_size * token + options.max_running_requests * facts["vocab_size"] * 4 * _LOGITS_KEPT
