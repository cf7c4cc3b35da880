"""How far each layer sees, as the masks say that transformers' code makes for it.

Some families hand a layer its window as an argument, some only as a mask, and transformers' eager attention reads the
mask alone. So the attention functions that are registered here ask for a mask too, which is one number: the window.
Invariant: a layer has the window that its eager mask would have; `check_...` of engine and trainer compare the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

LAYER_NUMBERS = ("layer", "step", "interval", "pattern", "period", "dense", "every")
"""In names of a config's fields that count layers."""


class WindowMasks:
    """Makes masks of one number, on the host: 0 for a layer that sees everything before it."""

    def __init__(self) -> None:
        self._made: dict[int, Tensor] = {}

    def __call__(self, *_args: Any, local_size: int | None = None, **_keywords: Any) -> Tensor:
        """In the place of the functions of transformers' `AttentionMaskInterface`."""
        size = local_size or 0
        if size not in self._made:
            self._made[size] = torch.full((1, 1, 1, 1), size, dtype=torch.int32)
        return self._made[size]


def window_of(mask: Tensor | None, argument: int | None) -> int | None:
    """Of a layer that was given this mask and this `sliding_window`; None where it sees everything before it.

    The argument counts for models whose masks were not made here.
    """
    if mask is None or mask.dtype != torch.int32:
        return argument
    return int(mask.numpy().flat[0]) or None  # no `item`, which a device would be waited for with


def window_fields(facts: Mapping[str, Any]) -> dict[str, int]:
    """The fields of a config that limit how far a layer sees, or cut sequences into pieces."""
    return {
        name: value
        for name, value in facts.items()
        if isinstance(value, int)
        and not isinstance(value, bool)
        and ("window" in name or "chunk" in name or name == "local_attention")
        and not any(part in name for part in LAYER_NUMBERS)
        and value > 0
    }
