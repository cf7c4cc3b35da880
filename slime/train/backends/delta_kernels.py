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
from torch.nn.functional import silu

from slime.algorithms.delta_rule import Chunks, causal_conv, gated_delta_rule
from slime.errors import UserError

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
