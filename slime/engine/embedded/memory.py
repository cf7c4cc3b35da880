"""The engine's device memory, which a trainer on the same GPU gets while the engine has nothing to do.

Invariant: weights and KV cache stay at their addresses while their memory is away, so graphs and compiled code are made
once. Nothing reads or writes them in the meantime; what comes back is empty, unless a copy was kept.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch import nn

from slime.cluster.memory.cuda_driver import CudaRefused
from slime.cluster.memory.regions import DeviceRegion, aligned, pinned_bytes
from slime.engine.embedded.errors import Conflict
from slime.engine.embedded.model.runner import ModelRunner
from slime.engine.embedded.options import EngineOptions
from slime.errors import UserError

log = logging.getLogger(__name__)


class EngineMemory:
    """The two regions of one model on a GPU: its parameters, and what it keeps of running sequences."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._weights = DeviceRegion(device)
        self._cache = DeviceRegion(device)
        self._kept: torch.Tensor | None = None  # the weights on the host, while they are away
        self._backup: torch.Tensor | None = None  # room for that, made once

    @classmethod
    def on(cls, device: torch.device) -> EngineMemory | None:
        """None where the driver has no such memory: it is then torch's, and graphs are captured anew each time."""
        if device.type != "cuda":
            return None
        try:
            return cls(device)
        except CudaRefused as reason:
            log.warning("memory that is released comes back at other addresses, so graphs are made anew: %s", reason)
            return None

    # the weights

    @torch.no_grad()
    def adopt(self, model: nn.Module, together: Iterable[SequenceOf[str]] = ()) -> None:
        """Move all parameters here, wherever they are; those that share memory go on sharing it.

        Parameters that are named `together` come to lie one behind the other.
        """
        own = dict(model.named_parameters(remove_duplicate=False))
        groups = [[own[name] for name in names] for names in together]
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
        self._weights.range.prepare(sum(aligned(storage.nbytes()) for storage in storages.values()))
        _move_together(groups, lambda size: self._weights.empty((size,), torch.uint8))
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
        """Room for tensors of one dtype, to be filled; those named `together` lie one behind the other."""
        groups = [list(names) for names in together]
        grouped = {name for names in groups for name in names}
        groups += [[name] for name in shapes if name not in grouped]
        sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
        totals = [sum(sizes[name] for name in names) for names in groups]
        self._weights.range.prepare(sum(aligned(total) for total in totals))
        placed: dict[str, torch.Tensor] = {}
        for names, total in zip(groups, totals, strict=True):
            room = self._weights.empty((total,), torch.uint8)
            for name, part in zip(names, room.split([sizes[name] for name in names]), strict=True):
                placed[name] = part.view(dtype).view(shapes[name])
        return placed

    def release_weights(self, *, keep: bool) -> None:
        """Give their memory back; `keep`: with a copy on the host, from which they come back."""
        if keep:
            held = self._weights.contents()
            if self._backup is None:
                self._backup = pinned_bytes(held.numel())
            self._kept = self._backup.copy_(held)
        self._weights.release()

    def restore_weights(self) -> None:
        """Take memory for them again; they are what they were only if a copy was kept."""
        self._take_back(self._weights, "weights")
        if self._kept is not None:
            self._weights.contents().copy_(self._kept)
            self._kept = None

    # the KV cache

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the cache."""
        return self._cache.empty(shape, dtype).zero_()

    def release_cache(self) -> None:
        self._cache.release()

    def restore_cache(self) -> None:
        """An empty one."""
        self._take_back(self._cache, "KV cache")
        self._cache.contents().zero_()

    def _take_back(self, region: DeviceRegion, what: str) -> None:
        try:
            region.take_back()
        except CudaRefused as reason:
            free, needed = torch.cuda.mem_get_info(self._device)[0], region.range.full_bytes
            raise Conflict(
                f"there is no memory for the {what}: {needed / 2**30:.1f} GiB are needed and {free / 2**30:.1f} are "
                f"free on this GPU ({reason}); have the trainer let go of its own first, or lower --mem-fraction"
            ) from reason


@torch.no_grad()
def lay_together(model: nn.Module, together: Iterable[SequenceOf[str]]) -> None:
    """The same where memory is torch's own: parameters of a group come to lie one behind the other."""
    own = dict(model.named_parameters(remove_duplicate=False))
    device = next(model.parameters()).device
    _move_together(
        [[own[name] for name in names] for names in together],
        lambda size: torch.empty(size, dtype=torch.uint8, device=device),
    )


def _move_together(groups: list[list[nn.Parameter]], room: Callable[[int], torch.Tensor]) -> None:
    for group in groups:
        sizes = [parameter.nbytes for parameter in group]
        for parameter, part in zip(group, room(sum(sizes)).split(sizes), strict=True):
            parameter.data = part.view(parameter.dtype).view(parameter.shape).copy_(parameter)


# How many tokens the KV cache has room for.
#
# Invariant: what is given to the cache is no more than --mem-fraction of the memory that is free when the weights are
# there, and leaves as much as the steps themselves need: graphs, activations of the longest extend step, logits.

_CPU_KV_BYTES = 2 << 30
_LOGITS_KEPT = 8  # fp32 logits of a whole batch that graphs of all sizes and drawing take together


def affordable_slots(runner: ModelRunner, options: EngineOptions, facts: Mapping[str, Any], context_len: int) -> int:
    """As many as the memory has room for, and never more than all running requests can fill.

    `facts` is the text model's config.
    """
    budget, reason = _budget(runner, options, facts)
    states = runner.states.total_bytes(runner.dtype)
    if states and states > budget:
        raise UserError(
            f"the states of {options.max_running_requests} running requests take {states / 2**30:.1f} GiB, "
            f"and there are {max(budget, 0) / 2**30:.1f}{reason}: lower --max-running-requests, or raise --mem-fraction"
        )
    budget = budget - states if runner.cuda else min(budget - states, _CPU_KV_BYTES)
    if runner.cuda and budget < runner.kv_bytes_per_token():
        raise UserError(
            f"no memory is left for the KV cache{reason}: lower --chunked-prefill-size or --max-running-requests, "
            "raise --mem-fraction, or free memory on this GPU"
        )
    wanted = options.max_running_requests * context_len
    return max(1, min(wanted, budget // runner.kv_bytes_per_token()))


def _budget(runner: ModelRunner, options: EngineOptions, facts: Mapping[str, Any]) -> tuple[int, str]:
    """Bytes, and what else was taken away from them."""
    if not runner.cuda:
        return int(_available_ram() * options.mem_fraction), ""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    kept = step_bytes(runner.dtype, options, facts)
    return min(int(free * options.mem_fraction), free - kept), f", beside {kept / 2**30:.1f} GiB that steps need"


def step_bytes(dtype: torch.dtype, options: EngineOptions, facts: Mapping[str, Any]) -> int:
    """What computing takes at most, by the model's shape: an extend step's activations, and logits."""
    hidden, heads = facts["hidden_size"], facts["num_attention_heads"]
    inner = max(facts.get("intermediate_size") or 0, 4 * hidden)
    wide = heads * (facts.get("head_dim") or hidden // heads)
    token = dtype.itemsize * (4 * inner + 6 * wide) + 4 * 4 * hidden  # norms compute in fp32
    return options.chunked_prefill_size * token + options.max_running_requests * facts["vocab_size"] * 4 * _LOGITS_KEPT


def _available_ram() -> int:
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    return _CPU_KV_BYTES
