"""Constants and LoRA adapters of a fused decoder layer.

`Adapters` adds LoRA to a matrix product that several linear layers are joined into:

    rows_i = x W_i^T + scale * x A_i^T B_i^T        rows_i: the columns of layer i

Invariant: the products of x with the A of all adapted layers are one product as well, x [A_1; A_2; ...]^T, and B_i adds
to the columns of layer i; a layer without an adapter costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerFacts:
    """Constants of a decoder layer that the kernels need."""

    heads: int
    kv_heads: int
    eps: float  # of the norm over the hidden states
    head_eps: float  # of the norms over each head
    second_eps: float  # of the norm after attention
    in_float8: bool = False  # True if the forward's products are in 8-bit floats
    lora_scale: float = 0.0  # factor of the adapters' products, if there are any


@dataclass(frozen=True)
class _Adapter:
    """The adapter of one of the joined layers."""

    place: int  # index of A among all matrices; B follows
    columns: slice
    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]


class Adapters:
    """Adapters of layers whose `weights` are joined; `matrices` are A and B of each layer, or None twice."""

    def __init__(self, weights: Sequence[Tensor], matrices: Sequence[Tensor | None], scale: float) -> None:
        ends = list(accumulate(map(len, weights)))
        self._count, self._scale = len(matrices), scale
        self._present = [
            _Adapter(2 * index, slice(end - len(weight), end), a, b)
            for index, (weight, end) in enumerate(zip(weights, ends, strict=True))
            if (a := matrices[2 * index]) is not None and (b := matrices[2 * index + 1]) is not None
        ]

    def __bool__(self) -> bool:
        return bool(self._present)

    def add(self, rows: Tensor, x: Tensor) -> Tensor | None:
        """Add the adapters' products to the rows in place; returns x A^T of all adapters, for the backward."""
        if not self._present:
            return None
        low = x @ self._joined.t()
        for adapter, part in zip(self._present, self._parts(low), strict=True):
            rows[:, adapter.columns].addmm_(part, adapter.b.t(), alpha=self._scale)
        return low

    def pull(self, d_rows: Tensor, d_x: Tensor) -> Tensor | None:
        """Add the gradient through the adapters to `d_x` in place; returns the gradient of x A^T."""
        if not self._present:
            return None
        d_low = torch.cat([d_rows[:, adapter.columns] @ adapter.b for adapter in self._present], 1).mul_(self._scale)
        d_x.addmm_(d_low, self._joined)
        return d_low

    def gradients(self, d_rows: Tensor, x: Tensor, low: Tensor | None, d_low: Tensor | None) -> list[Tensor | None]:
        """Compute the gradients of the matrices, in their order; `low` and `d_low` are from `add` and `pull`."""
        found: list[Tensor | None] = [None] * self._count
        if low is None or d_low is None:
            return found
        d_a = (d_low.t() @ x).split([len(adapter.a) for adapter in self._present])
        for adapter, part, gradient in zip(self._present, self._parts(low), d_a, strict=True):
            found[adapter.place] = gradient
            found[adapter.place + 1] = (d_rows[:, adapter.columns].t() @ part).mul_(self._scale)
        return found

    @property
    def _joined(self) -> Tensor:
        each = [adapter.a for adapter in self._present]
        return each[0] if len(each) == 1 else torch.cat(each)

    def _parts(self, low: Tensor) -> Sequence[Tensor]:
        return low.split([len(adapter.a) for adapter in self._present], 1)
