"""What the kernels need to know of a decoder layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerFacts:
    heads: int
    kv_heads: int
    eps: float  # of the norm over the hidden states
    head_eps: float  # of those over each head
    second_eps: float  # of the norm after attention
    in_float8: bool = False  # whether products of the forward are
    lora_scale: float = 0.0  # of what adapters add, if there are any


# LoRA beside a matrix product that several linear layers are joined into.
#
#     rows_i = x W_i^T + scale * x A_i^T B_i^T        rows_i: the columns of layer i
#
# Invariant: what the layers with an adapter multiply x with is one product as well, x [A_1; A_2; ...]^T, and B_i adds
# to the columns where the other product lies; a layer without an adapter costs nothing.


@dataclass(frozen=True)
class _Adapter:
    place: int  # of its matrices among all
    columns: slice
    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]


class Adapters:
    """Those of layers whose `weights` are joined; `matrices` are A and B of each, or None twice."""

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
        """Adds to the rows what the adapters give; x A^T of all of them, which the backward wants."""
        if not self._present:
            return None
        low = x @ self._joined.t()
        for adapter, part in zip(self._present, self._parts(low), strict=True):
            rows[:, adapter.columns].addmm_(part, adapter.b.t(), alpha=self._scale)
        return low

    def pull(self, d_rows: Tensor, d_x: Tensor) -> Tensor | None:
        """Adds to the gradient of x what comes through the adapters; the gradient of x A^T."""
        if not self._present:
            return None
        d_low = torch.cat([d_rows[:, adapter.columns] @ adapter.b for adapter in self._present], 1).mul_(self._scale)
        d_x.addmm_(d_low, self._joined)
        return d_low

    def gradients(self, d_rows: Tensor, x: Tensor, low: Tensor | None, d_low: Tensor | None) -> list[Tensor | None]:
        """Those of the matrices, in their order; `low` and `d_low` are what `add` and `pull` gave."""
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
