"""Reads regions of the tensors in safetensors files, and quantises to and from blocks of 8-bit floats.

Invariant: reading a region loads only its rows along the first dimension. The region has its own memory and no file is
mapped, as `safetensors.safe_open` does, so a region that is freed costs no memory.

Blocks of 8-bit floats have one scale per block of 128 x 128, as DeepSeek V3 and its successors are stored:

    <module>.weight            float8_e4m3fn
    <module>.weight_scale_inv  float32, one number per block: weight = stored x scale

Invariant: representable values are restored exactly; a block of zeros stays zeros.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from slime.errors import UserError
from slime.models.families.tp_sharding import Region, region_shape, whole_region
from slime.models.folder import read_safetensors_header
from slime.storage.json_types import JsonObject

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file; regions of it are read on demand."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, region: Region) -> torch.Tensor:
        shape = region_shape(region)
        if 0 in shape:
            return torch.empty(shape, dtype=self.dtype)
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        rows = region[0] if region else slice(0, 1)
        raw = self._bytes(self.begin + rows.start * row, (rows.stop - rows.start) * row)
        read = raw.view(self.dtype).view(shape[:1] + self.shape[1:])
        return read if read.shape == shape else read[(slice(None), *region[1:])].contiguous()

    def _bytes(self, begin: int, count: int) -> torch.Tensor:
        """Read bytes of the file in several calls: one call returns at most 2 GiB, and fewer bytes at the end."""
        raw = torch.empty(count, dtype=torch.uint8)
        space, done = raw.numpy().data, 0
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(begin)
                while done < count and (got := file.readinto(space[done:])):
                    done += got
        except OSError as cause:
            raise UserError(f"{self.path} cannot be read: {cause.strerror}") from cause
        if done < count:
            raise UserError(f"{self.path} ends before {self.name} does: copy or download it again")
        return raw


def stored_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """The tensors of files by name, from their headers alone; for a name in two files, the later file wins."""
    return {stored.name: stored for path in sorted(files) for stored in _read_header(path)}


def _read_header(path: Path) -> list[StoredTensor]:
    try:
        header, _, data_begin = read_safetensors_header(path)
        size, found = path.stat().st_size, []
        for name, entry in header.items():
            kind = DTYPES.get(entry["dtype"])
            if kind is None:
                raise UserError(
                    f"{name} in {path} is of type {entry['dtype']}, which cannot be read: convert the folder first"
                )
            shape = tuple(int(size) for size in entry["shape"])
            begin, end = (int(offset) for offset in entry["data_offsets"])
            stored = StoredTensor(path, name, shape, kind, data_begin + begin)
            if min((begin, *shape), default=0) < 0 or end - begin != stored.num_bytes:
                raise ValueError(f"{name} has {end - begin} bytes, which do not match its shape and type")
            found.append(stored)
    except OSError as cause:
        raise UserError(f"{path} cannot be loaded: {cause.strerror}") from cause
    except (ValueError, KeyError, TypeError, AttributeError) as cause:
        raise UserError(f"{path} cannot be loaded: it is not a safetensors file, or is truncated ({cause})") from cause
    for stored in found:
        if stored.begin + stored.num_bytes > size:
            raise UserError(f"{path} cannot be loaded: it ends before {stored.name} does, copy or download it again")
    return found


FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
SCALE_SUFFIX = "_scale_inv"
BLOCK = (128, 128)
_NOT_QUANTIZED = re.compile(
    r"norm|embed|lm_head|router|\.gate\.weight$|shared_expert_gate|eh_proj|weights_proj|conv1d|in_proj_(a|b|ba)\.|visual"
)
"""Weights that are not quantised: tables, norms, routers and heads lose too much, and engines expect them unquantised.
"""


def quantize_block(
    weight: torch.Tensor, block: tuple[int, int] = BLOCK, *, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix; returns the 8-bit matrix and its scales, powers of two (UE8M0) with `power_of_two`."""
    rows, columns = weight.shape
    blocked = _block_view(weight.float(), block)
    largest = blocked.abs().amax(dim=(1, 3))
    scale = torch.where(largest > 0, largest / LARGEST, torch.ones_like(largest))
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    stored = (blocked / scale[:, None, :, None]).clamp(-LARGEST, LARGEST).to(FP8)
    whole = stored.view(torch.uint8).reshape(scale.shape[0] * block[0], scale.shape[1] * block[1])
    return whole[:rows, :columns].contiguous().view(FP8), scale


def dequantize_block(stored: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] = BLOCK) -> torch.Tensor:
    """The dequantised matrix in float32, contiguous and without padding."""
    rows, columns = stored.shape
    blocked = _block_view(stored.float(), block) * scale.float()[:, None, :, None]
    height, _, width, _ = blocked.shape
    return blocked.reshape(height * block[0], width * block[1])[:rows, :columns].contiguous()


def _block_view(matrix: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """View a matrix as (block rows, rows per block, block columns, columns per block), padded with zeros."""
    rows, columns = matrix.shape
    down, across = -rows % block[0], -columns % block[1]
    if down or across:
        matrix = torch.nn.functional.pad(matrix, (0, across, 0, down))
    return matrix.reshape(matrix.shape[0] // block[0], block[0], matrix.shape[1] // block[1], block[1])


class BlockQuantizer:
    """Quantises a stream of named tensors; records the modules that it does not quantise, for the folder's config."""

    def __init__(self, *, power_of_two: bool = False) -> None:
        self.power_of_two = power_of_two
        self.kept: list[str] = []

    def stream(
        self, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            if is_linear(name, tensor) and not _NOT_QUANTIZED.search(name):
                stored, scale = quantize_block(tensor, power_of_two=self.power_of_two)
                yield name, stored
                yield f"{name}{SCALE_SUFFIX}", scale
                continue
            if is_linear(name, tensor):
                self.kept.append(name.removesuffix(".weight"))
            yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor

    def config(self) -> JsonObject:
        facts: JsonObject = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(BLOCK),
            "modules_to_not_convert": sorted(self.kept),
        }
        return facts | {"scale_fmt": "ue8m0"} if self.power_of_two else facts


def is_linear(name: str, tensor: torch.Tensor) -> bool:
    return name.endswith(".weight") and tensor.dim() == 2 and tensor.is_floating_point()


class WeightReader:
    """Reads the tensors of several safetensors files by name, one at a time. `names` are in the order of the layers."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._stored = stored_tensors(files)
        self.names = sorted(self._stored, key=natural_order)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._stored[name].read(whole_region(self._stored[name].shape))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self[name]) for name in self.names)


def open_weights(folder: Path) -> WeightReader:
    return WeightReader(weight_files(folder))


def weight_files(folder: Path) -> list[Path]:
    """All weight files of a model folder; UserError if there are none."""
    files = list(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"model folder {folder} has no *.safetensors weights: download them, or convert the folder")
    return files


def natural_order(name: str) -> list[tuple[int, str]]:
    """A sort key that puts layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
