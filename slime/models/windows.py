"""Attention windows of layers, taken from the masks that transformers makes for them.

Some families pass a layer its window as an argument, some only as a mask, and transformers' eager attention reads the
mask alone. So our attention functions request a mask too, which holds one number: the window. Invariant: a layer has
the window that its eager mask would have; `check_...` of engine and trainer compare the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

LAYER_NUMBERS = ("layer", "step", "interval", "pattern", "period", "dense", "every")
"""Words in the names of config fields that count layers."""


class WindowMasks:
    """Makes masks of one number, the window, on the host; 0 for a layer without a window."""

    def __init__(self) -> None:
        self._made: dict[int, Tensor] = {}

    def __call__(self, *_args: object, local_size: int | None = None, **_keywords: object) -> Tensor:
        """Make the mask, as a function of transformers' `AttentionMaskInterface`."""
        size = local_size or 0
        if size not in self._made:
            self._made[size] = torch.full((1, 1, 1, 1), size, dtype=torch.int32)
        return self._made[size]


def window_of(mask: Tensor | None, argument: int | None) -> int | None:
    """The window of a layer with this mask and this `sliding_window` argument; None without a window.

    The argument is used for models whose masks were not made here.
    """
    if mask is None or mask.dtype != torch.int32:
        return argument
    return int(mask.numpy().flat[0]) or None  # not `item`, which would wait for the device


def window_fields(facts: Mapping[str, object]) -> dict[str, int]:
    """The fields of a config that limit how far a layer attends, or split sequences into chunks."""
    return {
        name: value
        for name, value in facts.items()
        if isinstance(value, int)
        and not isinstance(value, bool)
        and ("window" in name or "chunk" in name or name == "local_attention")
        and not any(part in name for part in LAYER_NUMBERS)
        and value > 0
    }
