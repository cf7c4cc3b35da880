"""A tensor as the bytes that deltas and checksums are made of: little endian, C order."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from slime.models.delta.blob import ByteArray, checksum_function
from slime.models.delta.sum64 import sum64_of_tensors


def bytes_of(tensor: torch.Tensor) -> ByteArray:
    """The bytes on the host: the tensor's own memory if it is contiguous and on the CPU, else a copy.

    From a GPU they come into pinned memory, in both directions several times as fast; torch keeps and reuses it.
    """
    tensor = tensor.detach().contiguous()
    if tensor.is_cuda:
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    array: ByteArray = tensor.reshape(-1).view(torch.uint8).numpy()
    return array


def put_bytes(target: torch.Tensor, data: ByteArray) -> None:
    """Put bytes back; where `bytes_of` gave the tensor's own memory they are there already."""
    source = torch.from_numpy(data).view(target.dtype).view(target.shape)
    if source.data_ptr() != target.data_ptr():
        with torch.no_grad():
            target.copy_(source)


def bytes_in_place(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes where they are: the tensor's own memory if it is contiguous, else a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def tensor_checksums(tensors: Iterable[tuple[str, torch.Tensor]], kind: str = "xxh3-128") -> dict[str, str]:
    """The checksum of every tensor, by name; on the device that it is on, if its kind can be computed there."""
    if kind == "sum64":
        known = dict(tensors)
        return dict(zip(known, sum64_of_tensors(list(known.values())), strict=True))
    function = checksum_function(kind)
    return {name: function(bytes_of(tensor)) for name, tensor in tensors}
