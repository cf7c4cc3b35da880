"""Causal attention with a window, capped scores or sinks, in memory that grows with the length and not its square.

The queries are taken some at a time, with the keys they can see; backward computes the weights again from the
normaliser of each query, which is all that is kept. Invariant: values and gradients are those of the whole matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CELLS = {"cpu": 1 << 22, "cuda": 1 << 25}  # scores at once: enough to keep the device busy
SMALLEST_WINDOW = 64  # queries of a narrow window that are taken together all the same


@dataclass(frozen=True)
class Rules:
    """softmax(cap(scale q k)) over the last `window` positions."""

    scale: float
    window: int | None
    softcap: float | None
    cells: int  # scores held at once

    @classmethod
    def on(cls, device: torch.device, scale: float, window: int | None, softcap: float | None) -> Rules:
        return cls(scale, window, softcap, CELLS.get(device.type, CELLS["cuda"]))


def chunked_attention(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, rules: Rules) -> Tensor:
    """[n, heads, L, D] and keys and values [n, kv heads, L, D] to [n, heads, L, Dv]; `sinks`: a logit for each head."""
    output: Tensor = _Chunked.apply(query, key, value, sinks, rules)
    return output


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, rules: Rules) -> Tensor:
        output = query.new_empty(*query.shape[:3], value.shape[3])
        normaliser = query.new_empty(query.shape[:3], dtype=_wide(query))
        for chunk in _chunks(query, key, rules):
            scores = chunk.hide(chunk.scores(query, key))
            total = scores.logsumexp(-1)
            if sinks is not None:
                total = torch.logaddexp(total, _per_head(sinks, total))
            weights = scores.sub_(total[..., None]).exp_()
            output[:, :, chunk.queries] = (chunk.fold(weights.to(value.dtype)) @ chunk.seen(value)).view(
                *query.shape[:2], -1, value.shape[3]
            )
            normaliser[:, :, chunk.queries] = total.flatten(1, 2)
        ctx.rules, ctx.has_sinks = rules, sinks is not None
        ctx.save_for_backward(query, key, value, output, normaliser, *([sinks] if sinks is not None else []))
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, normaliser, *rest = ctx.saved_tensors
        grad = upstream[0]
        d_query = torch.empty_like(query)
        d_key, d_value = (torch.zeros_like(states, dtype=_wide(query)) for states in (key, value))
        inner = (grad.to(_wide(query)) * output).sum(-1)  # what the weights of a query give its gradient, together
        for chunk in _chunks(query, key, ctx.rules):
            scores = chunk.scores(query, key)
            weights = (chunk.hide(scores) - chunk.rows(normaliser)[..., None]).exp_()
            out = chunk.fold(chunk.rows(grad))
            d_value[:, :, chunk.keys] += chunk.fold(weights.to(grad.dtype)).transpose(2, 3) @ out
            toward = (out @ chunk.seen(value).transpose(2, 3)).view_as(weights)
            d_scores = weights.mul_(toward - chunk.rows(inner)[..., None])
            if ctx.rules.softcap is not None:
                d_scores.mul_(1 - (scores / ctx.rules.softcap).square_())
            folded = chunk.fold(d_scores.mul_(ctx.rules.scale).to(query.dtype))
            d_query[:, :, chunk.queries] = (folded @ chunk.seen(key)).view(*query.shape[:2], -1, query.shape[3])
            d_key[:, :, chunk.keys] += folded.transpose(2, 3) @ chunk.fold(chunk.rows(query))
        d_sinks = None
        if rest:
            share = (rest[0].to(_wide(query)).view(1, -1, 1) - normaliser).exp()
            d_sinks = -(share * inner).sum((0, 2)).to(rest[0].dtype)
        return d_query, d_key.to(key.dtype), d_value.to(value.dtype), d_sinks, None


@dataclass(frozen=True)
class _Chunk:
    """Some queries and the keys that any of them sees. Scores are [n, kv heads, heads of each, queries, keys]."""

    queries: slice
    keys: slice
    kv_heads: int
    rules: Rules

    def rows(self, states: Tensor) -> Tensor:
        """[n, heads, L, ...] to the chunk's part [n, kv heads, heads of each, queries, ...]."""
        return states[:, :, self.queries].unflatten(1, (self.kv_heads, -1))

    def fold(self, states: Tensor) -> Tensor:
        """Heads that share a key side by side: one product for all of them."""
        return states.flatten(2, 3)

    def seen(self, states: Tensor) -> Tensor:
        return states[:, :, self.keys]

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        rows = self.rows(query)
        scores = (self.fold(rows) @ self.seen(key).transpose(2, 3)).to(_wide(query)).mul_(self.rules.scale)
        if self.rules.softcap is not None:
            scores = scores.div_(self.rules.softcap).tanh_().mul_(self.rules.softcap)
        return scores.view(*rows.shape[:4], -1)

    def hide(self, scores: Tensor) -> Tensor:
        """Minus infinity where a key is in the future of a query or out of its window."""
        at = torch.arange(self.queries.start, self.queries.stop, device=scores.device)
        distance = at[:, None] - torch.arange(self.keys.start, self.keys.stop, device=scores.device)
        hidden = distance < 0
        if self.rules.window is not None:
            hidden |= distance >= self.rules.window
        return scores.masked_fill(hidden, float("-inf"))


def _chunks(query: Tensor, key: Tensor, rules: Rules) -> Iterator[_Chunk]:
    count, heads, length = query.shape[:3]
    reach = min(length, rules.window or length)
    most = max(rules.cells // (count * heads * reach), 1)
    if reach < length:  # a chunk sees `reach` keys more than it has queries
        most = min(max(most // 2, 1), max(reach, SMALLEST_WINDOW))
    for begin in range(0, length, most):
        end = min(begin + most, length)
        yield _Chunk(slice(begin, end), slice(max(0, begin - reach + 1), end), key.shape[1], rules)


def _per_head(sinks: Tensor, like: Tensor) -> Tensor:
    return sinks.to(like.dtype).view(1, *like.shape[1:3], 1)


def _wide(states: Tensor) -> torch.dtype:
    """What scores and sums are computed in."""
    return torch.promote_types(states.dtype, torch.float32)
