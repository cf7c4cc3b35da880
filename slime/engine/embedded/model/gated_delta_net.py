"""Gated delta net layers, with a recurrent state of fixed size per sequence (Qwen3-Next and its successors).

The state of a sequence is in its row of the slot table: the last inputs of the convolution and, in fp32, the matrix
that the delta rule reads and writes. Tokens of several sequences in one batch never mix.
Invariant: `held[row]` is the number of tokens of its sequence that the state of a row includes, and -1 while a step
writes to it, so a failed step never leaves a state that looks valid.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from slime.engine.embedded.model.attention import MakeZeros

_CHUNK = 64  # tokens for which the delta rule is solved at once


@dataclass(frozen=True)
class StateShape:
    """Sizes of the convolution and the delta-rule matrix of a layer."""

    channels: int
    kernel: int
    heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class PaddedPieces:
    """Pieces of sequences of similar length, padded: piece `i` is `lens[i]` tokens of table row `rows[i]`."""

    rows: torch.Tensor  # [b]
    begun: torch.Tensor  # [b, 1, 1], 0 for pieces at the start of a sequence, else 1
    lens: torch.Tensor  # [b]
    longest: int
    tokens: torch.Tensor  # [n], indices of the tokens in the batch
    places: torch.Tensor  # [n], their indices in the flattened [b, longest]

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Pad batch values `[T, ...]` to `[b, longest, ...]`, with zeros after the end of each piece."""
        wide = values.new_zeros(len(self.rows) * self.longest, *values.shape[1:])
        wide[self.places] = values[self.tokens]
        return wide.view(len(self.rows), self.longest, *values.shape[1:])


def group_pieces(
    rows: SequenceOf[int], starts: SequenceOf[int], lens: SequenceOf[int], device: torch.device
) -> list[PaddedPieces]:
    """Group consecutive pieces of a batch by similar length."""
    first = np.concatenate([[0], np.cumsum(lens)])
    groups: list[list[int]] = []
    for i in sorted(range(len(lens)), key=lambda i: lens[i]):
        if groups and lens[i] <= 1.5 * lens[groups[-1][0]] + 16:
            groups[-1].append(i)
        else:
            groups.append([i])
    pieces = []
    for members in groups:
        longest = max(lens[i] for i in members)
        tokens = np.concatenate([first[i] + np.arange(lens[i]) for i in members])
        places = np.concatenate([at * longest + np.arange(lens[i]) for at, i in enumerate(members)])
        begun = torch.tensor([float(starts[i] > 0) for i in members], device=device).view(-1, 1, 1)
        pieces.append(
            PaddedPieces(
                torch.tensor([rows[i] for i in members], device=device),
                begun,
                torch.tensor([lens[i] for i in members], device=device),
                longest,
                torch.from_numpy(tokens).to(device),
                torch.from_numpy(places).to(device),
            )
        )
    return pieces


class DeltaNetStates:
    """States of all gated delta net layers, and their inputs for the batch in flight."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.shapes: dict[int, StateShape] = {}
        self.held = np.full(rows, -1)
        self.spans: list[PaddedPieces] | None = None  # of an extend step; None: a decode step, one token per row
        self.rows = torch.empty(0, dtype=torch.int64, device=device)  # of a decode step
        self.conv: dict[int, torch.Tensor] = {}  # [rows, kernel - 1, channels]
        self.matrix: dict[int, torch.Tensor] = {}  # [rows, heads, key_dim, value_dim]
        self.convolve: Callable[..., torch.Tensor] = convolve
        self.step: Callable[..., torch.Tensor] = step
        if device.type == "cuda":
            from slime.engine.embedded.model import delta_net_kernels

            self.convolve, self.step = delta_net_kernels.convolve, delta_net_kernels.step

    def __bool__(self) -> bool:
        return bool(self.shapes)

    def total_bytes(self, dtype: torch.dtype) -> int:
        conv = sum((s.kernel - 1) * s.channels * dtype.itemsize for s in self.shapes.values())
        return len(self.held) * (conv + sum(4 * s.heads * s.key_dim * s.value_dim for s in self.shapes.values()))

    def allocate(self, dtype: torch.dtype, zeros: MakeZeros) -> None:
        rows = len(self.held)
        for layer, s in self.shapes.items():
            self.conv[layer] = zeros((rows, s.kernel - 1, s.channels), dtype)
            self.matrix[layer] = zeros((rows, s.heads, s.key_dim, s.value_dim), torch.float32)

    def free(self) -> None:
        self.conv, self.matrix = {}, {}
        self.held[:] = -1


class DeltaNet(nn.Module):
    """A gated delta net with the parameters of `plain` under their names, and with states by table row."""

    A_log: nn.Parameter
    dt_bias: nn.Parameter
    conv1d: nn.Conv1d
    norm: nn.Module
    out_proj: nn.Linear
    in_proj_qkvz: nn.Linear  # Qwen3-Next
    in_proj_ba: nn.Linear
    in_proj_qkv: nn.Linear  # Qwen3.5
    in_proj_z: nn.Linear
    in_proj_b: nn.Linear
    in_proj_a: nn.Linear

    def __init__(self, plain: nn.Module, layer: int, states: DeltaNetStates) -> None:
        super().__init__()
        for name, parameter in plain.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, child in plain.named_children():
            self.add_module(name, child)
        own: Any = plain
        self.layer, self._states = layer, states
        self._plain_order = getattr(own, "fix_query_key_value_ordering", None)
        self._heads, self._key_heads = own.num_v_heads, own.num_k_heads
        self._key_dim, self._value_dim = own.head_k_dim, own.head_v_dim
        channels = 2 * own.key_dim + own.value_dim
        self.shape = StateShape(channels, own.conv_kernel_size, self._heads, self._key_dim, self._value_dim)

    def forward(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        """Map `[1, T, hidden]` to `[1, T, hidden]` for the batch in flight."""
        qkv, z, b, a = self._project(hidden_states)
        beta = b.sigmoid()
        decay = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
        if self._states.spans is None:  # a decode step
            conv, matrix = self._states.conv[self.layer], self._states.matrix[self.layer]
            rows = self._states.rows
            q, k, v = self._heads_of(self._states.convolve(conv, rows, qkv, self.conv1d.weight[:, 0]))
            mixed = self._states.step(matrix, rows, q, k, v, decay, beta.float()).to(qkv.dtype)
        else:
            mixed = qkv.new_empty(len(qkv), self._heads, self._value_dim)
            for spans in self._states.spans:
                wide = self._extend(spans, *(spans.spread(x) for x in (qkv, beta, decay)))
                mixed[spans.tokens] = wide.flatten(0, 1)[spans.places].to(mixed.dtype)
        gated = self.norm(mixed.reshape(-1, self._value_dim), z.reshape(-1, self._value_dim))
        return self.out_proj(gated.reshape(1, len(qkv), -1))

    def _project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the convolution's input `[T, channels]`, the output gate, and beta and decay inputs per head."""
        if self._plain_order is None:  # Qwen3.5
            parts = (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
            return tuple(part(hidden)[0] for part in parts)
        q, k, v, z, b, a = self._plain_order(self.in_proj_qkvz(hidden), self.in_proj_ba(hidden))
        return torch.cat([x.flatten(2) for x in (q, k, v)], -1)[0], z[0], b[0], a[0]

    def _heads_of(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split into q, k `[..., heads, key_dim]` of unit length (q scaled), v `[..., heads, value_dim]`, in fp32."""
        key = self._key_heads * self._key_dim
        q, k, v = F.silu(qkv).float().split([key, key, self._heads * self._value_dim], -1)
        q, k = (x.unflatten(-1, (self._key_heads, -1)) for x in (q, k))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        repeat = self._heads // self._key_heads
        q, k = (x.repeat_interleave(repeat, -2) for x in (q * self._key_dim**-0.5, k))
        return q, k, v.unflatten(-1, (self._heads, -1))

    def _extend(self, spans: PaddedPieces, qkv: torch.Tensor, beta: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
        """Return `[b, longest, heads, value_dim]` in fp32.

        After the end of a piece beta and decay are zero, so padding does not change the state.
        """
        s, layer = self._states, self.layer
        before = qkv.new_zeros(len(qkv), self.shape.kernel - 1, self.shape.channels)
        start = qkv.new_zeros((len(qkv), self._heads, self._key_dim, self._value_dim), dtype=torch.float32)
        if s.conv:
            before = s.conv[layer][spans.rows] * spans.begun.to(qkv.dtype)
            start = s.matrix[layer][spans.rows] * spans.begun[..., None]
        window = torch.cat([before, qkv], 1)
        weight = self.conv1d.weight
        q, k, v = self._heads_of(F.conv1d(window.transpose(1, 2), weight, groups=weight.shape[0]).transpose(1, 2))
        mixed, end = delta_rule(q, k, v, decay, beta.float(), start)
        if s.conv:
            last = spans.lens[:, None] + torch.arange(self.shape.kernel - 1, device=qkv.device)
            s.conv[layer][spans.rows] = window[torch.arange(len(qkv), device=qkv.device)[:, None], last]
            s.matrix[layer][spans.rows] = end
        return mixed


def convolve(inputs: torch.Tensor, rows: torch.Tensor, fresh: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the newest output `[b, channels]` and shift `rows` of `inputs [rows, kernel - 1, channels]` by one."""
    window = torch.cat([inputs[rows], fresh[:, None]], 1)
    inputs[rows] = window[:, 1:]
    return (window * weight.t()).sum(1)


def step(matrices: torch.Tensor, rows: torch.Tensor, *token: torch.Tensor) -> torch.Tensor:
    """Apply the delta rule to one token of each of `rows`; `token` is q, k, v, decay and beta as in `delta_step`."""
    q, k, v, decay, beta = token
    out, matrices[rows] = delta_step(q, k, v, decay, beta, matrices[rows])
    return out


def delta_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the delta rule to one token per sequence; returns its output `[b, h, V]` and the new state.

    q, k `[b, h, K]`, v `[b, h, V]`, decay and beta `[b, h]`, state `[b, h, K, V]`.
    """
    state = state * decay.exp()[..., None, None]
    known = (k[..., None, :] @ state)[..., 0, :]
    state = state + k[..., None] * ((v - known) * beta[..., None])[..., None, :]
    return (q[..., None, :] @ state)[..., 0, :], state


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the delta rule to m tokens, in chunks; returns outputs `[b, m, h, V]` and the new state.

    q, k `[b, m, h, K]`, v `[b, m, h, V]`. Within a chunk the corrections depend on one another through a triangular
    system, which is solved at once.
    """
    m = q.shape[1]
    size = min(_CHUNK, m)
    pad = -m % size
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, pad)).transpose(1, 2).unflatten(2, (-1, size)) for x in (q, k, v))
    decay, beta = (F.pad(x, (0, 0, 0, pad)).transpose(1, 2).unflatten(2, (-1, size)) for x in (decay, beta))
    total = decay.cumsum(-1)  # [b, h, chunks, size]
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
    weighted = k * beta[..., None]
    system = (weighted @ k.transpose(-1, -2)) * between
    seen = (q @ k.transpose(-1, -2)) * between
    wanted = torch.cat([v * beta[..., None], weighted * total.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    fresh, read = solved.split([v.shape[-1], k.shape[-1]], -1)
    q = q * total.exp()[..., None]
    k = k * (total[..., -1:] - total).exp()[..., None]
    shrink = total[..., -1].exp()[..., None, None]
    out = torch.empty_like(fresh)
    for i in range(q.shape[2]):
        corrected = fresh[:, :, i] - read[:, :, i] @ state
        out[:, :, i] = q[:, :, i] @ state + seen[:, :, i] @ corrected
        state = state * shrink[:, :, i] + k[:, :, i].transpose(-1, -2) @ corrected
    return out.flatten(2, 3)[:, :, :m].transpose(1, 2), state


def replace_delta_nets(model: nn.Module, rows: int, device: torch.device) -> DeltaNetStates:
    """Replace the model's gated delta nets by `DeltaNet` layers; returns their states."""
    states = DeltaNetStates(rows, device)
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer).__name__.endswith("GatedDeltaNet") and hasattr(layer, "head_k_dim"):
                own: Any = layer
                net = DeltaNet(layer, own.layer_idx, states)
                states.shapes[own.layer_idx] = net.shape
                setattr(parent, name, net)
    return states
