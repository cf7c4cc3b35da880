"""Gated delta nets (Qwen3-Next, Qwen3.5) over packed rows.

Invariant: the parameters keep their names, so folders, checkpoints and engines see the model's own; a token reads only
earlier tokens of its own sequence. If ranks share a row, each has a part of the tokens outside the layer and a part of
the heads, over all tokens, inside it, as in attention (`attention.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slime.errors import UserError
from slime.train.backends.delta_kernels import mix_tokens, to_own_heads, to_own_tokens
from slime.train.backends.fsdp.packed_context import PackedContext

_CHILDREN = {"conv1d", "norm", "out_proj"}
_PARAMETERS = {"A_log", "dt_bias"}


def is_delta_net(module: nn.Module) -> bool:
    """Return True for one of transformers' gated delta nets, recognised by its children and parameters."""
    children = {name for name, _ in module.named_children()}
    parameters = {name for name, _ in module.named_parameters(recurse=False)}
    projects = "in_proj_qkvz" in children or "in_proj_qkv" in children
    return projects and children >= _CHILDREN and parameters >= _PARAMETERS


class PackedDeltaNet(nn.Module):
    """Replaces transformers' module, with the same children and parameters."""

    in_proj_qkvz: nn.Module  # Qwen3-Next has these two,
    in_proj_ba: nn.Module
    in_proj_qkv: nn.Module  # Qwen3.5 these four
    in_proj_z: nn.Module
    in_proj_b: nn.Module
    in_proj_a: nn.Module
    conv1d: nn.Conv1d
    norm: nn.Module
    out_proj: nn.Module
    A_log: nn.Parameter
    dt_bias: nn.Parameter

    def __init__(self, net: Any, context: PackedContext) -> None:
        super().__init__()
        for name, child in net.named_children():
            self.add_module(name, child)
        for name, parameter in net.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        if net.activation not in ("silu", "swish"):
            raise UserError(f"gated delta nets support the activation silu, and this model's have {net.activation}")
        self._context = context
        self._key_heads, self._heads = int(net.num_k_heads), int(net.num_v_heads)
        self._key_dim, self._value_dim = int(net.head_k_dim), int(net.head_v_dim)

    def check_ranks(self, count: int) -> None:
        """Raise UserError unless `count` ranks can divide the key heads evenly."""
        if self._key_heads % count:
            fitting = ", ".join(str(size) for size in range(1, self._key_heads + 1) if self._key_heads % size == 0)
            raise UserError(
                f"--context-parallel-size {count} does not divide the {self._key_heads} key heads of the gated delta "
                f"nets: use one of {fitting}"
            )

    @torch.compiler.disable
    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        """Compute the layer's output [1, t, H] for this rank's tokens."""
        ranks = self._context.sharing
        states, gate = self._project(hidden_states[0])
        if ranks is None:
            output = self._mix(states, 0, 1)
        else:
            output = to_own_tokens(self._mix(to_own_heads(states, ranks), ranks.rank, ranks.size), ranks)
        output = self.norm(output.reshape(-1, self._value_dim), gate.reshape(-1, self._value_dim))
        projected: Tensor = self.out_proj(output.reshape(*hidden_states.shape[:2], -1))
        return projected

    def _project(self, hidden: Tensor) -> tuple[list[Tensor], Tensor]:
        """Project hidden states to queries, keys, values, rates, decays [t, key heads, ...], and the output's gate."""
        key, value, share = self._key_dim, self._value_dim, self._heads // self._key_heads
        if hasattr(self, "in_proj_qkvz"):
            mixed = self.in_proj_qkvz(hidden).unflatten(-1, (self._key_heads, -1))
            q, k, v, gate = mixed.split([key, key, share * value, share * value], dim=-1)
            rate, decay = self.in_proj_ba(hidden).unflatten(-1, (self._key_heads, -1)).split([share, share], dim=-1)
            return [q, k, v, rate, decay], gate
        widths = [self._key_heads * key, self._key_heads * key, self._heads * value]
        qkv = self.in_proj_qkv(hidden).split(widths, dim=-1)
        states = [*qkv, self.in_proj_b(hidden), self.in_proj_a(hidden)]
        return [part.unflatten(-1, (self._key_heads, -1)) for part in states], self.in_proj_z(hidden)

    def _mix(self, states: list[Tensor], rank: int, size: int) -> Tensor:
        """Mix tokens with the `rank`-th of `size` parts of the heads: [T, own key heads, heads per key head x V]."""
        widths = [self._key_heads * self._key_dim] * 2 + [self._heads * self._value_dim]

        def part_of(tensor: Tensor) -> Tensor:
            return tensor if size == 1 else torch.cat([part.chunk(size)[rank] for part in tensor.split(widths)])

        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        conv = part_of(weight), None if bias is None else part_of(bias)
        own = slice(rank * self._heads // size, (rank + 1) * self._heads // size)
        kernels = self._context.delta_kernels(states[0].device)
        return mix_tokens(kernels, states, conv, self.A_log[own], self.dt_bias[own], self._value_dim)
