"""What the layers of a model know of the packed row that is going through it."""

from __future__ import annotations

import torch

from slime.train.backends.delta_kernels import DeltaKernels, delta_kernels
from slime.train.samples.packing import PackedLayout
from slime.train.samples.shared_prompts import SharedPrompts
from slime.train.topology import Ranks


class PackedContext:
    """The layout of the row that is going through the model, and how many layers that mix tokens have read it.

    `ranks`, where there are several, have a part of the row's tokens each (ulysses.py). `is_indexed`: indexers pick the
    tokens that attention reads. Where prompts are `shared`, layers have each of their tokens once and attention all
    (copies.py).
    """

    def __init__(self, gdn_backend: str | None = None) -> None:
        self.layout: PackedLayout | None = None
        self.shared: SharedPrompts | None = None
        self.reads = 0
        self.ranks: Ranks | None = None
        self.is_indexed = False
        self._gdn_backend = gdn_backend
        self._kernels: DeltaKernels | None = None

    @property
    def sharing(self) -> Ranks | None:
        """The ranks that this row is cut over; None where it is whole."""
        return self.ranks if self.ranks is not None and self.ranks.size > 1 else None

    def begin(self, layout: PackedLayout, shared: SharedPrompts | None = None) -> None:
        self.layout, self.shared = layout, shared
        self.reads = 0
        self._kernels = None

    def read(self) -> PackedLayout:
        if self.layout is None:
            raise RuntimeError("a layer ran before a packed layout was set")
        self.reads += 1
        return self.layout

    def delta_kernels(self, device: torch.device) -> DeltaKernels:
        """Of the row's gated delta nets, made by the first of them."""
        layout = self.read()
        if self._kernels is None:
            self._kernels = delta_kernels(self._gdn_backend, layout.lengths, device)
        return self._kernels
