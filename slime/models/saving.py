"""Write a Hugging Face model folder.

Invariant: the folder at the target path is either the old one or the complete new one, never a half-written mixture.
Only what a run saved there, and nothing was added to since, is ever replaced.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slime.models.delta.folder import safetensors_entries
from slime.models.shards import NamedTensors, ShardWriter, iter_named, write_index
from slime.storage.files import MANIFEST, fsync_path, mark_written, refuse_to_replace

MAX_SHARD_BYTES = 5 * 1000**3
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx", ".index.json")
Beside = Callable[[Path], object]
"""Puts more files into a folder."""
COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")


def copy_model_files(source_folder: str | Path, target: Path) -> None:
    """Config, generation config, tokenizer files and remote code: everything small that is not a weight."""
    for file in sorted(Path(source_folder).iterdir()):
        is_small = file.name.endswith(COPIED_SUFFIXES) and not file.name.endswith(WEIGHT_SUFFIXES)
        if file.is_file() and is_small and file.name != MANIFEST:
            shutil.copy2(file, target / file.name)


def write_config_dtype(folder: Path, dtype: torch.dtype, quantization: dict[str, Any] | None = None) -> None:
    """Say in config.json what the weights are in; a folder of plain numbers says nothing of quantisation."""
    path = folder / "config.json"
    facts = json.loads(path.read_text())
    facts.pop("torch_dtype", None)
    facts["dtype"] = str(dtype).removeprefix("torch.")
    for place in (facts, facts.get("text_config")):
        if isinstance(place, dict):
            place.pop("quantization_config", None)
    if quantization is not None:
        facts["quantization_config"] = quantization
    path.write_text(json.dumps(facts, indent=2) + "\n")


def replace_folder(finished: Path, target: Path) -> None:
    """Put `finished` at `target` by renames; a previous `target` is removed only afterwards."""
    aside = target.with_name(f".{target.name}.old-{os.getpid()}")
    if target.exists():
        os.rename(target, aside)
    os.rename(finished, target)
    fsync_path(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def save_hf_folder(
    state_dict: NamedTensors,
    source_folder: str | Path,
    out: str | Path,
    dtype: torch.dtype,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    quantization: Callable[[], dict[str, Any]] | None = None,
    beside: Beside | None = None,
) -> Path:
    """Save HF-named tensors (a mapping or a stream of pairs) with the small files of `source_folder` to `out`.

    They are written in `dtype`; with `quantization`, which is asked for the config's entry at the end, as they are.
    `beside` puts more files into the folder before it is in its place.
    """
    with FolderDraft.begin(source_folder, out) as draft:
        writer = draft.writer(dtype if quantization is None else None, max_shard_bytes=max_shard_bytes)
        for name, tensor in iter_named(state_dict):
            writer.add(name, tensor)
        writer.finish()
        return draft.finish(dtype, None if quantization is None else quantization(), beside)


class FolderDraft:
    """A model folder that is written beside its place, until `finish` puts it there.

    One process begins and finishes it; others that know `staging` may write weights too, each under a name of its own.
    Leaving its block removes what was not finished.
    """

    def __init__(self, staging: Path, target: Path) -> None:
        self.staging = staging
        self.target = target

    @classmethod
    def begin(cls, source_folder: str | Path, out: str | Path) -> FolderDraft:
        """A draft with the small files of `source_folder`; refuses a place that holds something else."""
        target = Path(out).resolve()
        refuse_to_replace(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = cls(target.with_name(f".{target.name}.tmp-{os.getpid()}"), target)
        draft.discard()
        draft.staging.mkdir()
        try:
            copy_model_files(source_folder, draft.staging)
        except BaseException:
            draft.discard()
            raise
        return draft

    def writer(
        self, dtype: torch.dtype | None, *, name: str = "part", max_shard_bytes: int = MAX_SHARD_BYTES
    ) -> ShardWriter:
        """Weights go in here; with a `dtype` they are converted."""
        return ShardWriter(self.staging, prefix=name, max_bytes=max_shard_bytes, dtype=dtype)

    def finish(
        self, dtype: torch.dtype, quantization: dict[str, Any] | None = None, beside: Beside | None = None
    ) -> Path:
        """Number the files that all writers wrote, say in config.json what they are in, and put the folder in place;
        `beside` puts more files into it before."""
        _name_parts(self.staging)
        write_config_dtype(self.staging, dtype, quantization)
        if beside is not None:
            beside(self.staging)
        mark_written(self.staging)
        fsync_path(self.staging)
        refuse_to_replace(self.target)  # it took a while
        replace_folder(self.staging, self.target)
        return self.target

    def __enter__(self) -> FolderDraft:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.discard()

    def discard(self) -> None:
        """Remove what was not finished."""
        shutil.rmtree(self.staging, ignore_errors=True)


def _name_parts(folder: Path) -> None:
    parts = sorted(folder.glob("*.safetensors"))
    if len(parts) == 1:
        parts[0].rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, part in enumerate(parts, start=1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        for entry in safetensors_entries(part):
            weight_map[entry.name] = name
            total_bytes += entry.end - entry.start
        part.rename(folder / name)
    write_index(folder / "model.safetensors.index.json", weight_map, total_bytes)
