"""The tensors of a folder's safetensors files, by name and one at a time, whichever file they are in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from slime.errors import UserError
from slime.models.block_fp8 import FP8, SCALE_SUFFIX, dequantize_block
from slime.models.folder import block_size, quantization, read_config_json


class WeightReader:
    """Maps the files, reads nothing before it is asked for; names are in the order of the layers."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._file_of: dict[str, Any] = {}
        for path in sorted(files):
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as cause:
                raise UserError(f"{path} is no safetensors file, or only the beginning of one: {cause}") from cause
            self._file_of.update(dict.fromkeys(file.keys(), file))
        self.names = sorted(self._file_of, key=natural_order)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._file_of[name].get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self[name]) for name in self.names)


def plain_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of a model folder as plain numbers: blocks of 8-bit floats are multiplied out, in float32."""
    config = read_config_json(folder)
    block, quantized = block_size(config), quantization(config)
    if block is None and quantized:
        method = quantized.get("quant_method")
        raise UserError(f"{folder} is quantised ({method}): only blocks of 8-bit floats can be converted")
    weights = weights_of(folder)
    for name in weights.names:
        scale = f"{name}{SCALE_SUFFIX}"
        if name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in weights:
            continue
        tensor = weights[name]
        if tensor.dtype != FP8:
            yield name, tensor
        elif block is None or scale not in weights or weights.shape(scale) != _scales(tensor, block):
            raise UserError(f"{name} in {folder} is in 8-bit floats without a scale for each block: it cannot be read")
        else:
            yield name, dequantize_block(tensor, weights[scale], block)


def weights_of(folder: Path) -> WeightReader:
    files = list(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"model folder {folder} has no *.safetensors weights: download them, or convert the folder")
    return WeightReader(files)


def _scales(tensor: torch.Tensor, block: tuple[int, int]) -> tuple[int, ...] | None:
    """The shape that the scales of a matrix have."""
    if tensor.dim() != 2:
        return None
    return tuple(-(-size // part) for size, part in zip(tensor.shape, block, strict=True))


def natural_order(name: str) -> list[tuple[int, str]]:
    """A key that puts layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
