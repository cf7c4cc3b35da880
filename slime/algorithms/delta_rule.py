"""The gated delta rule of linear attention, and the short convolution before it, over sequences packed into one row.

Invariant: the result of a sequence does not depend on the others in its row. The convolution reads no token of another
sequence, and every sequence starts from an empty state. A chunk of tokens is computed by matrix products; a state is
carried from chunk to chunk, at once for all sequences that are long enough. All is computed in float32, independently
of the dtype of the states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 64


@dataclass(frozen=True)
class Chunks:
    """Layout of the tokens of a row when every sequence is cut into chunks of `CHUNK` tokens, the last one padded.

    The first chunks of all sequences come first, then the second ones, and so on, always with the longest sequence in
    front: each step of the scan reads a slice.
    """

    token: Tensor  # [chunks x CHUNK]: the token at a place; padding reads the one after the last, which is zero
    place: Tensor  # [T]: the place of a token
    position: Tensor  # [T]: the position of a token in its sequence
    alive: tuple[int, ...]  # the number of sequences that have an i-th chunk

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Chunks:
        sizes = np.asarray(lengths, dtype=np.int64)
        chunks = -(-sizes // CHUNK)
        alive = (chunks[None, :] > np.arange(chunks.max(initial=0))[:, None]).sum(axis=1)
        before = np.cumsum(alive) - alive
        rank = np.empty_like(chunks)
        rank[np.argsort(-chunks, kind="stable")] = np.arange(len(chunks))
        position = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        place = (before[position // CHUNK] + np.repeat(rank, sizes)) * CHUNK + position % CHUNK
        token = np.full(int(alive.sum()) * CHUNK, len(position))
        token[place] = np.arange(len(position))
        put = [torch.from_numpy(array).to(device) for array in (token, place, position)]
        return cls(token=put[0], place=put[1], position=put[2], alive=tuple(int(count) for count in alive))


def causal_conv(states: Tensor, weight: Tensor, bias: Tensor | None, position: Tensor) -> Tensor:
    """Convolve each channel over the last tokens of its sequence, [T, C]; `weight` [C, K] has the newest token last."""
    taps = weight.float().unbind(dim=1)
    wide = states.float()
    total = wide * taps[-1]
    for back, tap in enumerate(reversed(taps[:-1]), start=1):
        earlier = pad(wide, (0, 0, back, 0))[: len(wide)]
        total = total + torch.where((position >= back)[:, None], earlier, 0.0) * tap
    if bias is not None:
        total = total + bias.float()
    return total.to(states.dtype)


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, chunks: Chunks) -> Tensor:
    """Compute the gated delta rule, [T, heads, V]: queries read a state with decay exp(decay) and learning rate beta.

    `query` and `key` [T, key heads, K] are normalised here; a key head serves `heads / key heads` neighbouring heads.
    `value` [T, heads, V], `decay` and `beta` [T, heads].
    """
    repeats = value.shape[1] // key.shape[1]
    wide = (states.float() for states in (query, key))
    unit = (states * torch.rsqrt(states.square().sum(dim=-1, keepdim=True) + 1e-6) for states in wide)
    q, k = (states.repeat_interleave(repeats, dim=1) for states in unit)
    q = q * q.shape[-1] ** -0.5
    q, k, v = (_split_chunks(states, chunks) for states in (q, k, value.float()))  # [chunks, heads, CHUNK, D]
    rate, log_decay = (_split_chunks(states.float()[..., None], chunks) for states in (beta, decay))
    total = log_decay.cumsum(dim=2)
    upper = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = (total - total.transpose(2, 3)).masked_fill(upper, -torch.inf).exp()
    transposed = k.transpose(2, 3)
    system = ((k * rate) @ transposed) * between
    within = (q @ transposed) * between
    sides = torch.cat([v * rate, k * rate * total.exp()], dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    new_values, read_keys = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    last = total[:, :, -1:]
    steps = (new_values, read_keys, q * total.exp(), within, k * (last - total).exp(), last.exp())
    output = _scan(steps, chunks.alive).transpose(1, 2).flatten(0, 1)
    return output.index_select(0, chunks.place).to(value.dtype)


def _split_chunks(states: Tensor, chunks: Chunks) -> Tensor:
    """Cut [T, heads, D] into chunks, [chunks, heads, CHUNK, D]."""
    padded = pad(states, (0, 0, 0, 0, 0, 1)).index_select(0, chunks.token)
    return padded.unflatten(0, (-1, CHUNK)).transpose(1, 2)


def _scan(steps: Sequence[Tensor], alive: Sequence[int]) -> Tensor:
    """Compute the outputs of all chunks step by step; the sequences that continue are always the first ones."""
    shape = (alive[0], steps[0].shape[1], steps[1].shape[-1], steps[0].shape[-1])
    state = steps[0].new_zeros(shape)
    outputs = []
    for values, read_keys, query, within, write_keys, decay in zip(*(s.split(list(alive)) for s in steps), strict=True):
        state = state[: len(values)]
        written = values - read_keys @ state
        outputs.append(query @ state + within @ written)
        state = state * decay + write_keys.transpose(2, 3) @ written
    return torch.cat(outputs)
