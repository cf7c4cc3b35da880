"""Weights through a folder on disk: each version is a whole Hugging Face model folder, `weight_v{N:06d}`.

The invariant: a folder by that name is complete (it is written under another name and renamed), and the newest version
that reached the engines is kept until a newer one has; older ones are removed.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.engine.client import EngineClient, PauseMode
from slime.weights.publisher import RunAsync, Staged, WeightPublisher, WeightSource

INDEX_NAME = "model.safetensors.index.json"
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
_VERSION_NAME = re.compile(r"weight_v(\d{6,})")


class DiskPublisher(WeightPublisher):
    """Writes versions into `root`, with the config and tokenizer files of `hf_checkpoint` beside the tensors."""

    def __init__(
        self,
        source: WeightSource,
        clients: Sequence[EngineClient],
        run_async: RunAsync,
        *,
        root: Path,
        hf_checkpoint: Path,
        timeout_s: float = 600.0,
        pause_mode: PauseMode = "abort",
    ) -> None:
        super().__init__(source, clients, run_async, timeout_s=timeout_s, pause_mode=pause_mode)
        self._root = root.absolute()
        self._hf_checkpoint = hf_checkpoint
        self._root.mkdir(parents=True, exist_ok=True)

    def _stage(self, version: int) -> Staged:
        folder = self._root / f"weight_v{version:06d}"
        unfinished = self._root / f".{folder.name}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        try:
            written = [Path(path) for path in self._source.export_weights(unfinished, version)]
            names = _name_like_a_checkpoint(written, unfinished)
            copy_model_assets(self._hf_checkpoint, unfinished)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
        return Staged(folder, tuple(folder / name for name in names))

    async def _announce(self, client: EngineClient, staged: Staged, version: int) -> None:
        await client.update_weights_from_disk(staged.folder, version, timeout_s=self._timeout_s)

    def _retire(self, staged: Staged, version: int, *, arrived: bool) -> None:
        for folder in self._root.iterdir() if arrived else ():
            match = _VERSION_NAME.fullmatch(folder.name)
            if match and int(match[1]) < version:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Nothing: the last version is left for whoever wants to look at it or restart an engine from it."""


def copy_model_assets(source: Path, target: Path) -> None:
    """Copy config, tokenizer and other small files of a model folder: everything but weights and their indexes."""
    for path in sorted(source.iterdir()):
        is_weight = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.is_file() and not is_weight and not path.name.startswith("."):
            shutil.copyfile(path, target / path.name)


def _name_like_a_checkpoint(files: Sequence[Path], folder: Path) -> list[str]:
    """Rename bucket files to `model-00001-of-0000N.safetensors`, write their index, and return the new names."""
    weight_map: dict[str, str] = {}
    total_size = 0
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    for path, name in zip(files, names, strict=True):
        header = read_safetensors_header(path)
        weight_map.update(dict.fromkeys(header, name))
        total_size += sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values())
        path.rename(folder / name)
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    return names


def read_safetensors_header(path: Path) -> dict[str, Any]:
    """The entries (dtype, shape, data_offsets) of a safetensors file by tensor name, without reading any tensor."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header
