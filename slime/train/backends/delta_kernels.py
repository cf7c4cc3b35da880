"""Kernels of gated delta nets: a package's on a GPU if it is installed, else plain torch.

`--qwen-gdn-backend` names the package; without it flash-linear-attention is used where it is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from slime.algorithms.delta_rule import Chunks, causal_conv, gated_delta_rule
from slime.errors import UserError
from slime.train.topology import Ranks, exchange

PACKAGES = {"fla": ("fla", "fla.ops.gated_delta_rule"), "flashqla": ("flash_qla", "flash_qla")}
INSTALL = {"fla": "pip install flash-linear-attention", "flashqla": "install FlashQLA"}


class DeltaKernels(Protocol):
    """Kernels for one packed row of sequences; states are [T, ...]."""

    def conv(self, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the causal convolution of [T, C] with `weight` [C, K], and its activation."""
        ...

    def rule(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Compute the same as `slime.algorithms.delta_rule.gated_delta_rule`."""
        ...


def check_delta_kernels(asked: str | None) -> None:
    """Raise UserError if the requested kernels cannot run here."""
    if asked is None:
        return
    if importlib.util.find_spec(PACKAGES[asked][0]) is None:
        raise UserError(
            f"--qwen-gdn-backend {asked} needs the package {PACKAGES[asked][0]}, which is not installed: "
            f"{INSTALL[asked]}, or leave the flag out"
        )
    if not torch.cuda.is_available():
        raise UserError(f"--qwen-gdn-backend {asked} needs a GPU: leave the flag out, and torch computes it")


def delta_kernels(asked: str | None, lengths: Sequence[int], device: torch.device) -> DeltaKernels:
    """Choose the kernels for a row with sequences of these lengths."""
    name = asked or "fla"
    if device.type != "cuda" or importlib.util.find_spec(PACKAGES[name][0]) is None:
        return TorchKernels(lengths, device)
    return PackageKernels(name, lengths, device)


class TorchKernels:
    """Gated delta nets in plain torch."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self._chunks = Chunks.of(lengths, device)

    def conv(self, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return silu(causal_conv(states, weight, bias, self._chunks.position))

    def rule(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        return gated_delta_rule(query, key, value, decay, beta, self._chunks)


class PackageKernels:
    """`chunk_gated_delta_rule` of flash-linear-attention, or FlashQLA's, which has the same signature."""

    def __init__(self, name: str, lengths: Sequence[int], device: torch.device) -> None:
        package = importlib.import_module(PACKAGES[name][1])
        self._rule: Callable[..., tuple[Tensor, object]] = package.chunk_gated_delta_rule
        ends = torch.tensor([0, *lengths]).cumsum(0)
        self._bounds = ends.to(device)
        self._position = torch.cat([torch.arange(length) for length in lengths]).to(device)

    def conv(self, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return silu(causal_conv(states, weight, bias, self._position))

    def rule(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        repeats = value.shape[1] // key.shape[1]
        query, key = (states.repeat_interleave(repeats, dim=1) for states in (query, key))
        states = [tensor[None].contiguous() for tensor in (query, key, value, decay, beta)]
        output, _ = self._rule(*states, use_qk_l2norm_in_kernel=True, cu_seqlens=self._bounds)
        return output[0]


def mix_tokens(
    kernels: DeltaKernels,
    states: Sequence[Tensor],
    conv: tuple[Tensor, Tensor | None],
    a_log: Tensor,
    dt_bias: Tensor,
    value_dim: int,
) -> Tensor:
    """Apply the convolution and the delta rule to queries, keys, values, rates and decays [T, key heads, ...].

    `conv` are the convolution's weight and bias, `a_log` and `dt_bias` those of the states' heads. Returns
    [T, key heads, heads per key head x V].
    """
    q, k, v, rate, decay = states
    mixed = kernels.conv(torch.cat([part.flatten(1) for part in (q, k, v)], dim=1), *conv)
    widths = [part[0].numel() for part in (q, k, v)]
    query, key, value = (part.unflatten(1, (q.shape[1], -1)) for part in mixed.split(widths, dim=1))
    log_decay = -a_log.float().exp() * softplus(decay.flatten(1).float() + dt_bias)
    heads = value.flatten(1).unflatten(1, (-1, value_dim))
    return kernels.rule(query, key, heads, log_decay, rate.flatten(1).sigmoid()).reshape(value.shape)


def to_own_heads(states: Sequence[Tensor], ranks: Ranks, order: Tensor | None = None) -> list[Tensor]:
    """Exchange this rank's tokens [t, heads, W] for this rank's heads [T, heads / n, W].

    `order`: index of each token of the row in the concatenated tokens of the ranks; None: they are in order.
    """
    by_rank = torch.cat(list(states), dim=2).unflatten(1, (ranks.size, -1)).transpose(0, 1)
    received = exchange(by_rank, ranks).flatten(0, 1)
    received = received if order is None else received.index_select(0, order)
    return list(received.split([part.shape[2] for part in states], dim=2))


def to_own_tokens(output: Tensor, ranks: Ranks, order: Tensor | None = None) -> Tensor:
    """Exchange this rank's heads [T, heads / n, W] for this rank's tokens [t, heads, W]."""
    output = output if order is None else output.index_select(0, order.argsort())
    return exchange(output.unflatten(0, (ranks.size, -1)), ranks).transpose(0, 1).flatten(1, 2)
