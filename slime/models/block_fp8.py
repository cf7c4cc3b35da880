"""Weights in 8-bit floats with one scale per block of 128 x 128, as DeepSeek V3 and its followers are stored.

    <module>.weight            float8_e4m3fn
    <module>.weight_scale_inv  float32, one number per block: weight = stored x scale

Invariant: what is representable comes back exactly; a block of zeros stays zeros.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
SCALE_SUFFIX = "_scale_inv"
BLOCK = (128, 128)
_KEPT = re.compile(
    r"norm|embed|lm_head|router|\.gate\.weight$|shared_expert_gate|eh_proj|weights_proj|conv1d|in_proj_(a|b|ba)\.|visual"
)
"""Tables, norms, routers and heads lose too much; engines expect them as they are."""


def quantize_block(
    weight: torch.Tensor, block: tuple[int, int] = BLOCK, *, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The stored matrix and its scales; with `power_of_two` the scales are exact powers (UE8M0)."""
    rows, columns = weight.shape
    blocked = _blocks(weight.float(), block)
    largest = blocked.abs().amax(dim=(1, 3))
    scale = torch.where(largest > 0, largest / LARGEST, torch.ones_like(largest))
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    stored = (blocked / scale[:, None, :, None]).clamp(-LARGEST, LARGEST).to(FP8)
    whole = stored.view(torch.uint8).reshape(scale.shape[0] * block[0], scale.shape[1] * block[1])
    return whole[:rows, :columns].contiguous().view(FP8), scale


def dequantize_block(stored: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] = BLOCK) -> torch.Tensor:
    """The matrix in float32, in memory of its own size."""
    rows, columns = stored.shape
    blocked = _blocks(stored.float(), block) * scale.float()[:, None, :, None]
    height, _, width, _ = blocked.shape
    return blocked.reshape(height * block[0], width * block[1])[:rows, :columns].contiguous()


def _blocks(matrix: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """(rows of blocks, rows of one, columns of blocks, columns of one), the last ones filled up with zeros."""
    rows, columns = matrix.shape
    down, across = -rows % block[0], -columns % block[1]
    if down or across:
        matrix = torch.nn.functional.pad(matrix, (0, across, 0, down))
    return matrix.reshape(matrix.shape[0] // block[0], block[0], matrix.shape[1] // block[1], block[1])


class BlockQuantizer:
    """Quantises a stream of named tensors and remembers which modules it left alone, for the folder's config."""

    def __init__(self, *, power_of_two: bool = False) -> None:
        self.power_of_two = power_of_two
        self.kept: list[str] = []

    def stream(
        self, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            if is_linear(name, tensor) and not _KEPT.search(name):
                stored, scale = quantize_block(tensor, power_of_two=self.power_of_two)
                yield name, stored
                yield f"{name}{SCALE_SUFFIX}", scale
                continue
            if is_linear(name, tensor):
                self.kept.append(name.removesuffix(".weight"))
            yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor

    def config(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(BLOCK),
            "modules_to_not_convert": sorted(self.kept),
        }
        return facts | {"scale_fmt": "ue8m0"} if self.power_of_two else facts


def is_linear(name: str, tensor: torch.Tensor) -> bool:
    return name.endswith(".weight") and tensor.dim() == 2 and tensor.is_floating_point()
