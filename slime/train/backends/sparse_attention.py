"""Attention to the tokens that an indexer picks (DeepSeek's sparse attention, in GLM-5), within packed sequences.

Invariant: a token attends to at most `count` earlier tokens of its own sequence, those with the highest index scores,
and to all of them where there are no more. Picks are positions in the sequence; what they name after the token itself
counts for nothing. Nothing flows back into the scores: picking has no gradient.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from slime.train.backends.causal_attention import HALF, causal_attention
from slime.train.samples.packing import PackedLayout

QUERIES = 512
"""How many are scored at once: the scores of all indexer heads are that many times the length."""


@torch.no_grad()
def pick_tokens(query: Tensor, key: Tensor, weights: Tensor, layout: PackedLayout, count: int) -> Tensor:
    """[T, count], int32, of indexer queries [T, heads, D], keys [T, D] and a weight for each head [T, heads].

    [T, 0] stands for all tokens, where no sequence has more than `count`.
    """
    if layout.max_length <= count:
        return torch.empty(len(query), 0, dtype=torch.int32, device=query.device)
    lengths = list(layout.lengths)
    picked = [
        part
        for q, k, w in zip(query.split(lengths), key.split(lengths), weights.split(lengths), strict=True)
        for part in _pick(q, k, w, count)
    ]
    return torch.cat(picked)


def _pick(query: Tensor, key: Tensor, weights: Tensor, count: int) -> list[Tensor]:
    """Of one sequence, some queries at a time."""
    heads, width = query.shape[1:]
    everything = torch.arange(count, dtype=torch.int32, device=query.device)
    picked = []
    for begin, end in _blocks(len(query)):
        if end <= count:
            picked.append((everything % end).expand(end - begin, count))
            continue
        scores = torch.einsum("qhd,kd->qhk", query[begin:end].float(), key[:end].float()) * width**-0.5
        total = torch.einsum("qh,qhk->qk", weights[begin:end].float() * heads**-0.5, scores.relu())
        picked.append(total.masked_fill(_after(begin, end, query.device), -torch.inf).topk(count).indices.int())
    return picked


def picked_attention(
    query: Tensor, key: Tensor, value: Tensor, picked: Tensor, layout: PackedLayout, scale: float
) -> Tensor:
    """[T, heads, Dv] of queries and keys [T, heads, D] and what `pick_tokens` gave."""
    if picked.shape[1] == 0:
        return causal_attention(query, key, value, layout, scale)
    dtype, lengths = query.dtype, list(layout.lengths)
    if not query.is_cuda and dtype in HALF:  # the CPU's backward takes four times as long in half precision
        query, key, value = query.float(), key.float(), value.float()
    outputs = []
    for q, k, v, chosen in zip(*(states.split(lengths) for states in (query, key, value, picked)), strict=True):
        keys, values = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        for begin, end in _blocks(len(q)):
            seen = torch.zeros(end - begin, len(q), dtype=torch.bool, device=q.device)
            seen = seen.scatter_(1, chosen[begin:end].long(), True)[:, :end] & ~_after(begin, end, q.device)
            block = q[begin:end].transpose(0, 1)[None]
            output = functional.scaled_dot_product_attention(
                block, keys[:, :, :end], values[:, :, :end], attn_mask=seen, scale=scale
            )
            outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs).to(dtype)


def _blocks(length: int) -> list[tuple[int, int]]:
    return list(pairwise([*range(0, length, QUERIES), length]))


def _after(begin: int, end: int, device: torch.device) -> Tensor:
    """[queries, keys]: the keys that come after the queries `begin` to `end`."""
    return torch.arange(end, device=device) > torch.arange(begin, end, device=device)[:, None]
