"""Parts of tensors on their way to an owner, whole or as what changed since they were sent before.

Invariant: what an owner makes of a message is bit for bit the part that was sent. A message of changes is never longer
than one of everything: numbers that changed with their places, or all of them where that is less.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slime.train.backends.hf import Earlier

WHOLE = -1
"""In the place of how many numbers changed: all are sent, without their places."""
_PLACE = torch.int32
_LARGEST = torch.iinfo(_PLACE).max
_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Message:
    """Bytes of one part; `changed` numbers, or `WHOLE`."""

    changed: int
    pieces: tuple[Tensor, ...]


def whole_message(part: Tensor) -> Message:
    return Message(WHOLE, (_bytes(part),))


def changes_of(part: Tensor, key: str, earlier: Earlier) -> Message:
    """What is to be sent of a part; from now on it is what was sent before."""
    before = earlier.given.get(key)
    if before is None:
        earlier.given[key] = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda).copy_(part)
        return whole_message(part)
    new = _bits(part).view(-1)
    places = (new != _bits(before.to(part.device, non_blocking=True)).view(-1)).nonzero().view(-1)
    if not len(places):
        return Message(0, ())
    before.copy_(part)
    if part.numel() > _LARGEST or message_bytes(len(places), part.numel(), part.itemsize) >= part.nbytes:
        return whole_message(part)
    return Message(len(places), (_bytes(places.to(_PLACE)), _bytes(new[places])))


def message_bytes(changed: int, count: int, width: int) -> int:
    """How long the message of a part of `count` numbers is."""
    return count * width if changed == WHOLE else changed * (_PLACE.itemsize + width)


@dataclass
class Received:
    """What one rank sent of a bucket: messages of its parts, one after the other."""

    raw: Tensor
    changed: list[int]

    def apply_to(self, block: Tensor) -> None:
        """Take the next message, and make the block of its tensor what it is on that rank."""
        changed = self.changed.pop(0)
        if changed == WHOLE:
            block.copy_(self._next(block.nbytes, block.dtype).view(block.shape))
        elif changed:
            places = self._next(changed * _PLACE.itemsize, _PLACE).long()
            values = self._next(changed * block.itemsize, block.dtype)
            flat = block.contiguous().view(-1)
            _bits(flat)[places] = _bits(values)
            block.copy_(flat.view(block.shape))

    def _next(self, size: int, dtype: torch.dtype) -> Tensor:
        taken, self.raw = self.raw[:size], self.raw[size:]
        aligned = taken if taken.storage_offset() % dtype.itemsize == 0 else taken.clone()
        return aligned.view(dtype)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_SAME_WIDTH[tensor.element_size()])
