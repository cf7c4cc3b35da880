"""Attention of sequences whose tokens are on several ranks: each rank attends with some heads, over all tokens.

Between the layers a rank has a part of the row's tokens. Around attention the ranks exchange tokens for heads and back
(DeepSpeed's Ulysses), so that attention itself is that of one rank: windows, caps and sinks are the head's own affair.
Invariant: rank r has the r-th part of the tokens and the r-th part of the heads; where ranks outnumber the keys' heads,
or do not divide them, these are repeated until they do.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slime.models.shape import check_context_parallel
from slime.train.collectives import exchange
from slime.train.topology import Ranks


def to_own_heads(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, ranks: Ranks
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """[1, heads, t, D] of this rank's tokens to [1, heads / n, T, D] of this rank's heads; `sinks`: one a head."""
    heads, kv_heads = query.shape[1], key.shape[1]
    check_context_parallel(heads, ranks.size)
    repeats = ranks.size // math.gcd(kv_heads, ranks.size)
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    by_rank = [states[0].transpose(0, 1).unflatten(1, (ranks.size, -1)) for states in (query, key, value)]
    flat = [states.flatten(2) for states in by_rank]  # [t, n, heads / n x D]: one exchange for all three
    received = exchange(torch.cat(flat, dim=2).transpose(0, 1), ranks).flatten(0, 1)
    own_query, own_key, own_value = (
        part.unflatten(1, states.shape[2:]).transpose(0, 1)[None]
        for part, states in zip(received.split([part.shape[2] for part in flat], dim=1), by_rank, strict=True)
    )
    own_sinks = None if sinks is None else sinks.unflatten(0, (ranks.size, -1))[ranks.rank]
    return own_query, own_key, own_value, own_sinks


def to_own_tokens(output: Tensor, ranks: Ranks) -> Tensor:
    """[1, T, heads / n, D] of this rank's heads to [1, t, heads, D] of this rank's tokens."""
    received = exchange(output[0].unflatten(0, (ranks.size, -1)), ranks)  # [n, t, heads / n, D], in the heads' order
    return received.transpose(0, 1).flatten(1, 2)[None]
