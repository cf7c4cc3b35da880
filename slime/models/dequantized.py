"""The weights of a model folder as plain numbers: stored as such, or dequantised from 8-bit and 4-bit floats.

Invariant: a read loads only the requested part of a tensor, and nothing is loaded before it; the files are those that
transformers would read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from slime.errors import UserError
from slime.models.families.tp_sharding import Region, region_shape, relative_region
from slime.models.folder import block_size, quantization, read_config_json
from slime.models.safetensors_io import (
    FP8,
    SCALE_SUFFIX,
    StoredTensor,
    dequantize_block,
    natural_order,
    stored_tensors,
    weight_files,
)
from slime.models.tensor_sources import DerivedSource, Source, read_whole

INDEX_FILE_NAME = "model.safetensors.index.json"
SINGLE_FILE_NAME = "model.safetensors"

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCKS, _SCALES = "_blocks", "_scales"


def plain_sources(folder: Path) -> dict[str, Source]:
    """A source for every weight by name; blocks of 8-bit and of 4-bit floats are dequantised."""
    config = read_config_json(folder)
    stored = stored_tensors(_weight_files(folder, config.get("transformers_weights")))
    block, method = block_size(config), quantization(config).get("quant_method")
    if block is not None:
        return dict(_from_fp8(folder, stored, block))
    if method == "mxfp4":
        return dict(_from_mxfp4(folder, stored))
    if method is not None:
        raise UserError(f"{folder} is quantised ({method}): only blocks of 8-bit floats and mxfp4 can be read")
    return dict(stored)


def plain_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every weight in any file of a model folder as plain numbers, in the order of the layers."""
    config = read_config_json(folder)
    block, quantized = block_size(config), quantization(config)
    if block is None and quantized:
        method = quantized.get("quant_method")
        raise UserError(f"{folder} is quantised ({method}): only blocks of 8-bit floats can be converted")
    stored = stored_tensors(weight_files(folder))
    sources = dict(_from_fp8(folder, stored, block))
    for name in sorted(sources, key=natural_order):
        yield name, read_whole(sources[name])


def _from_fp8(
    folder: Path, stored: dict[str, StoredTensor], block: tuple[int, int] | None
) -> Iterator[tuple[str, Source]]:
    for name, tensor in stored.items():
        scale = stored.get(f"{name}{SCALE_SUFFIX}")
        if name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in stored:
            continue
        if tensor.dtype != FP8:
            yield name, tensor
        elif (
            block is None
            or scale is None
            or len(tensor.shape) != 2
            or scale.shape != tuple(-(-size // part) for size, part in zip(tensor.shape, block, strict=True))
        ):
            raise UserError(f"{name} in {folder} is in 8-bit floats without a scale for each block: it cannot be read")
        else:
            yield name, DerivedSource(tensor.shape, torch.float32, partial(_read_fp8, tensor, scale, block))


def _read_fp8(stored: StoredTensor, scale: StoredTensor, block: tuple[int, int], region: Region) -> Tensor:
    """Read a region of a matrix in blocks of 8-bit floats, dequantised to float32."""
    if 0 in region_shape(region):
        return torch.empty(region_shape(region))
    covered = [  # the blocks that the region touches
        slice(part.start // size, -(-part.stop // size)) for part, size in zip(region, block, strict=True)
    ]
    around = tuple(
        slice(part.start * size, min(part.stop * size, side))
        for part, size, side in zip(covered, block, stored.shape, strict=True)
    )
    numbers = dequantize_block(stored.read(around), scale.read(tuple(covered)), block)
    return numbers[relative_region(region, around)]


def _from_mxfp4(folder: Path, stored: dict[str, StoredTensor]) -> Iterator[tuple[str, Source]]:
    for name, tensor in stored.items():
        if name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in stored:
            continue
        if not name.endswith(_BLOCKS):
            yield name, tensor
            continue
        plain = name.removesuffix(_BLOCKS)
        scales = stored.get(plain + _SCALES)
        if scales is None or len(tensor.shape) != 4 or scales.shape != tensor.shape[:-1]:
            raise UserError(f"{plain} in {folder} is in 4-bit floats without a scale for each block: it cannot be read")
        experts, outputs, groups, half = tensor.shape
        shape = (experts, groups * half * 2, outputs)
        yield plain, DerivedSource(shape, torch.bfloat16, partial(_read_mxfp4, tensor, scales))


def _read_mxfp4(blocks: StoredTensor, scales: StoredTensor, region: Region) -> Tensor:
    """Read experts in 4-bit floats (mxfp4) as bfloat16: outputs before inputs in the file, transposed here."""
    if 0 in region_shape(region):
        return torch.empty(region_shape(region), dtype=torch.bfloat16)
    experts, inputs, outputs = region
    half = blocks.shape[-1]
    groups = slice(inputs.start // (2 * half), -(-inputs.stop // (2 * half)))
    packed = blocks.read((experts, outputs, groups, slice(0, half)))
    exponents = scales.read((experts, outputs, groups)).to(torch.int32) - 127
    table = torch.tensor([*_FP4, *(-value for value in _FP4)], dtype=torch.bfloat16)
    pairs = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    numbers = torch.ldexp(table[pairs.int()], exponents.unsqueeze(-1)).to(torch.bfloat16).flatten(-2)
    first = groups.start * 2 * half
    return numbers[..., inputs.start - first : inputs.stop - first].transpose(1, 2).contiguous()


def _weight_files(folder: Path, named: str | None) -> list[Path]:
    """The files that transformers would read: a single file takes precedence over an index; other files are ignored.

    `named`: the file name that the config gives instead.
    """
    if named is None and (folder / SINGLE_FILE_NAME).is_file():
        named = SINGLE_FILE_NAME
    if named is not None and not str(named).endswith(".index.json"):
        return [folder / str(named)]
    index = folder / (named or INDEX_FILE_NAME)
    if not index.is_file():
        raise UserError(
            f"the weights in {folder} cannot be loaded: there is no {SINGLE_FILE_NAME} and no {INDEX_FILE_NAME}"
        )
    try:
        files = sorted({folder / str(file) for file in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as cause:
        raise UserError(
            f"{index} is not an index of weights ({type(cause).__name__}): download the folder again"
        ) from cause
    absent = next((file for file in files if not file.is_file()), None)
    if absent is not None:
        raise UserError(f"the weights in {folder} cannot be loaded: {absent.name} is not there, download it again")
    return files
