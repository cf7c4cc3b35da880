"""Hypothesis strategies for batches of unequal sequences with all kinds of masks (numpy, float64)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st


@dataclass(frozen=True)
class Ragged:
    """Sequence lengths, 0/1 masks, and a seed from which hypothesis can replay the numbers."""

    lengths: list[int]
    mask: np.ndarray
    seed: int

    def numbers(self, stream: int, scale: float = 1.0) -> np.ndarray:
        """Return [R] normal numbers; equal streams give equal numbers."""
        return np.random.default_rng([self.seed, stream]).normal(0.0, scale, sum(self.lengths))

    def spans(self) -> list[range]:
        """The positions of each sequence in the packed row."""
        ends = np.cumsum(self.lengths).tolist()
        return [range(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]

    def parts(self, values: np.ndarray) -> list[torch.Tensor]:
        """The packed row as one tensor per sequence."""
        return [torch.tensor(values[span.start : span.stop]) for span in self.spans()]


@st.composite
def ragged(draw: st.DrawFn, max_sequences: int = 5, max_length: int = 9) -> Ragged:
    lengths = draw(st.lists(st.integers(1, max_length), min_size=1, max_size=max_sequences))
    masks: list[int] = []
    for length in lengths:
        kind = draw(st.sampled_from(["all", "none", "some"]))
        some = draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)) if kind == "some" else None
        masks += some if some is not None else [int(kind == "all")] * length
    return Ragged(lengths, np.array(masks, dtype=np.float64), draw(st.integers(0, 2**32 - 1)))


def masked_mean(values: np.ndarray, mask: np.ndarray, span: range) -> float:
    """sum(v m) / max(sum m, 1), token by token."""
    total, count = 0.0, 0
    for t in span:
        if mask[t]:
            total, count = total + float(values[t]), count + 1
    return total / max(count, 1)


def leaf(values: np.ndarray) -> torch.Tensor:
    return torch.tensor(values, requires_grad=True)
