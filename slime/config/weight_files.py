"""Whether the weights of a folder are all there, told from their headers and lengths.

Invariant: a folder that passes has every file that its index names, each as long as its header says and with every
tensor that the index finds in it. No weight is read, so the check takes milliseconds for a model of any size.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from slime.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
AGAIN = "download the folder again"
_LONGEST_HEADER = 100_000_000
_LFS_POINTER = b"version https://git-lfs"


def check_weights(folder: Path, flag: str) -> dict[str, dict[str, Any]]:
    """The header entries of all tensors by name; a `UserError` unless the safetensors weights of a folder are complete.

    A single file goes before an index, as it does in transformers.
    """
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE, flag)
    if (folder / INDEX).exists():
        return _check_index(folder / INDEX, flag)
    if any(folder.glob("*.safetensors")):
        names = ", ".join(sorted(file.name for file in folder.glob("*.safetensors"))[:3])
        raise UserError(f"{flag} {folder} has {names}, but no {INDEX} that says what lies where: {AGAIN}")
    raise UserError(f"{flag} {folder} has no weights: {_remedy(folder)}")


def read_header(file: Path, flag: str) -> dict[str, Any]:
    """The tensors of a safetensors file by name; a `UserError` when it is cut off or no such file."""
    try:
        with file.open("rb") as opened:
            start = opened.read(8)
            if start + opened.read(len(_LFS_POINTER) - 8) == _LFS_POINTER:
                raise UserError(f"{flag}: {file} is only a Git LFS pointer: run git lfs pull in that folder")
            size = file.stat().st_size
            (length,) = struct.unpack("<Q", start) if len(start) == 8 else (0,)
            opened.seek(8)
            header = json.loads(opened.read(length)) if 2 <= length <= min(size - 8, _LONGEST_HEADER) else None
    except OSError as error:
        raise UserError(f"{flag}: cannot read {file} ({error.strerror})") from error
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise UserError(f"{flag}: {file} is no safetensors file, or only the beginning of one: {AGAIN}")
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    try:
        wanted = 8 + length + max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
    except (TypeError, KeyError, IndexError, ValueError):
        raise UserError(f"{flag}: the header of {file} is broken: {AGAIN}") from None
    if size != wanted:
        raise UserError(f"{flag}: {file} has {size} of the {wanted} bytes that its header names: {AGAIN}")
    return tensors


def _check_index(index: Path, flag: str) -> dict[str, dict[str, Any]]:
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: index.parent / file for name, file in places.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{flag}: {index} is no index of weights ({type(error).__name__}): {AGAIN}") from error
    absent = sorted({file.name for file in files.values() if not file.exists()})
    if absent:
        of = f"{len(absent)} of {len(set(files.values()))} weight files"
        raise UserError(f"{flag}: {index.parent} lacks {of}, {absent[0]} first: {AGAIN}")
    found = {file: read_header(file, flag) for file in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in found[file]:
            raise UserError(f"{flag}: {file} lacks {name}, which {INDEX} finds in it: {AGAIN}")
    return {name: found[file][name] for name, file in files.items()}


def _remedy(folder: Path) -> str:
    if any(folder.glob("*.bin")):
        return f"its .bin files are not read (they may run code), convert them with {conversion(folder)}"
    if any(folder.glob("*.pth")) or any(folder.glob("*.pt")):
        return "its .pt or .pth files are not read, take the model's safetensors"
    return f"there is no {SINGLE}, {AGAIN}"


def conversion(folder: Path) -> str:
    """A command that makes a safetensors folder of one with .bin files."""
    target = f"{folder.absolute()}-safetensors"
    return (
        'python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
        f"[c.from_pretrained('{folder}').save_pretrained('{target}') for c in (M, T)]\""
    )
