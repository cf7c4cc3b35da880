"""The zigzag layout of context parallelism: the part of a sequence that each rank holds.

A sequence is padded to 2 n chunks of equal length; rank i has chunks i and 2n - 1 - i, so that under a causal mask
every rank has the same work. All offsets count from the first token of the prompt; the logits at position p predict the
token at p + 1. A single rank (n = 1) has both chunks, which are the whole sequence.

Invariant: over all ranks the logits' spans cover the positions that predict the response exactly once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

Span = tuple[int, int]
Values = TypeVar("Values", Tensor, list[float])


def chunk_spans(total_length: int, *, rank: int, size: int) -> tuple[int, tuple[Span, Span]]:
    """Return the length of a chunk, and the spans of this rank's two chunks."""
    length = -(-total_length // (2 * size))
    mirror = 2 * size - 1 - rank
    return length, ((rank * length, (rank + 1) * length), (mirror * length, (mirror + 1) * length))


def logit_spans(total_length: int, response_length: int, *, rank: int, size: int) -> tuple[Span, Span]:
    """Return the positions of this rank whose logits predict response tokens; (0, 0) for a chunk without any."""
    first = total_length - response_length - 1
    _, chunks = chunk_spans(total_length, rank=rank, size=size)
    spans = [(max(begin, first), min(end, total_length - 1)) for begin, end in chunks]
    one, two = (span if span[0] < span[1] else (0, 0) for span in spans)
    return one, two


def shifted(spans: tuple[Span, Span]) -> tuple[Span, Span]:
    """Return the spans of the tokens that these logits predict."""
    one, two = ((begin + 1, end + 1) if begin < end else (0, 0) for begin, end in spans)
    return one, two


def own_chunks(tokens: Tensor, fill: float | Callable[[Tensor, int], Tensor], *, rank: int, size: int) -> Tensor:
    """Cut this rank's two chunks from a whole sequence; its end is padded with the value `fill`, or by calling it."""
    if size == 1:
        return tokens
    length, chunks = chunk_spans(len(tokens), rank=rank, size=size)
    missing = 2 * size * length - len(tokens)
    if callable(fill):
        padded = fill(tokens, missing)
    else:
        padded = pad(tokens, (0, 0) * (tokens.dim() - 1) + (0, missing), value=fill)
    return torch.cat([padded[begin:end] for begin, end in chunks])


def own_response(values: Values, total_length: int, response_length: int, *, rank: int, size: int) -> Values:
    """Select from one value per response token those that this rank's logits predict."""
    if size == 1:
        return values
    first = total_length - response_length - 1
    spans = logit_spans(total_length, response_length, rank=rank, size=size)
    one, two = (slice(max(begin - first, 0), max(end - first, 0)) for begin, end in spans)
    if isinstance(values, Tensor):
        return torch.cat([values[one], values[two]])
    return values[one] + values[two]


def whole_response(own: Tensor, total_length: int, response_length: int, *, rank: int, size: int) -> Tensor:
    """Place this rank's values at their positions in the response, zeros elsewhere: the sum over ranks is complete."""
    if size == 1:
        return own
    first = total_length - response_length - 1
    whole = own.new_zeros((response_length, *own.shape[1:]))
    taken = 0
    for begin, end in logit_spans(total_length, response_length, rank=rank, size=size):
        whole[max(begin - first, 0) : max(end - first, 0)] = own[taken : taken + end - begin]
        taken += end - begin
    return whole
