"""A response cut into spans of tokens that training treats alike.

Invariant: the spans follow one another without a gap, and their tokens add up to the response.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from slime.data.sample import Sample

TRAINED, MASKED, OBSERVED = "trained on", "masked", "observation"
"""Sampled and trained on; sampled and not trained on; not sampled by the model (tool output, templates)."""


@dataclass(frozen=True)
class Span:
    """Tokens `start` to `stop` of a sample, prompt included, and what they are."""

    kind: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def response_spans(sample: Sample) -> list[Span]:
    """The spans of a response; none when its mask does not belong to it."""
    length = sample.response_length
    mask = [1] * length if sample.loss_mask is None else sample.loss_mask
    if len(mask) != length or len(sample.tokens) < length:
        return []
    versions = [version for version, count in sample.version_spans for _ in range(count)]
    known = versions if len(versions) == length else [None] * length
    kinds = (
        TRAINED if trained else OBSERVED if version is None else MASKED
        for trained, version in zip(mask, known, strict=True)
    )
    return list(_runs(kinds, start=len(sample.tokens) - length))


def _runs(kinds: Iterator[str], start: int) -> Iterator[Span]:
    for kind, members in groupby(kinds):
        stop = start + sum(1 for _ in members)
        yield Span(kind, start, stop)
        start = stop
