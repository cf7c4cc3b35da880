"""Writes Hugging Face model folders.

Invariant: the folder at the target path is either the old one or the complete new one, never a half-written mixture.
Only a folder that slime wrote, and to which nothing was added since, is ever replaced. At most one shard of tensors is
held in memory, every name is written exactly once, and a file is complete and on disk before its path is returned.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from slime.models.delta.folder import safetensors_entries
from slime.storage.files import MANIFEST, fsync_path, mark_written, refuse_to_replace
from slime.storage.json_types import JsonObject

NOTES = "notes"
"""Key in the header of a file: the notes about its tensors, as JSON."""

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class ShardWriter:
    """Collects tensors and writes `{prefix}-{i:05d}.safetensors` whenever `max_bytes` would be passed."""

    def __init__(self, folder: Path, *, prefix: str, max_bytes: int, dtype: torch.dtype | None) -> None:
        self.folder = folder
        self.prefix = prefix
        self.max_bytes = max_bytes
        self.dtype = dtype
        self.paths: list[Path] = []
        self.weight_map: dict[str, str] = {}
        self._pending: dict[str, torch.Tensor] = {}
        self._notes: JsonObject = {}
        self._pending_bytes = 0

    def add(self, name: str, tensor: torch.Tensor, *, note: object = None) -> None:
        """Copy a tensor, with a JSON note for the header; `tensor` may change as soon as this returns."""
        if name in self.weight_map or name in self._pending:
            raise ValueError(f"tensor {name} was given twice")
        target = self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype
        ready = tensor.detach().to(target).to("cpu").contiguous()
        if ready.untyped_storage().nbytes() != ready.nbytes or ready.data_ptr() == tensor.data_ptr():
            ready = ready.clone()
        if self._pending and self._pending_bytes + ready.nbytes > self.max_bytes:
            self._write()
        self._pending[name] = ready
        self._pending_bytes += ready.nbytes
        if note is not None:
            self._notes[name] = note

    def finish(self) -> list[Path]:
        if self._pending or not self.paths:
            self._write()
        return self.paths

    def _write(self) -> None:
        path = self.folder / f"{self.prefix}-{len(self.paths) + 1:05d}.safetensors"
        noted = {NOTES: json.dumps(self._notes)} if self._notes else {}
        save_file(self._pending, path, metadata={"format": "pt"} | noted)
        fsync_path(path)
        self.weight_map.update(dict.fromkeys(self._pending, path.name))
        self.paths.append(path)
        self._pending, self._notes = {}, {}
        self._pending_bytes = 0


def write_index(path: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    """Write the `model.safetensors.index.json` that Hugging Face readers expect next to several shards."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    path.write_text(json.dumps(index, indent=2))
    fsync_path(path)


MAX_SHARD_BYTES = 5 * 1000**3
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx", ".index.json")
AddFiles = Callable[[Path], object]
"""Adds more files to a folder."""
COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")


def copy_model_files(source_folder: str | Path, target: Path) -> None:
    """Copy config, generation config, tokenizer files and remote code: every small file that is not a weight."""
    for file in sorted(Path(source_folder).iterdir()):
        is_small = file.name.endswith(COPIED_SUFFIXES) and not file.name.endswith(WEIGHT_SUFFIXES)
        if file.is_file() and is_small and file.name != MANIFEST:
            shutil.copy2(file, target / file.name)


def write_config_dtype(folder: Path, dtype: torch.dtype, quantization: JsonObject | None = None) -> None:
    """Write dtype and quantisation of the weights into config.json; plain weights have no quantisation entry."""
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
    """Move `finished` to `target` by renames; a previous `target` is removed only afterwards."""
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
    quantization: Callable[[], JsonObject] | None = None,
) -> Path:
    """Save HF-named tensors (a mapping or a stream of pairs) with the small files of `source_folder` to `out`.

    Tensors are converted to `dtype`, unless there is a `quantization`, which returns the config's entry at the end.
    """
    with FolderDraft.begin(source_folder, out) as draft:
        writer = draft.writer(dtype if quantization is None else None, max_shard_bytes=max_shard_bytes)
        for name, tensor in state_dict.items() if isinstance(state_dict, Mapping) else state_dict:
            writer.add(name, tensor)
        writer.finish()
        return draft.finish(dtype, None if quantization is None else quantization())


class FolderDraft:
    """A model folder that is written next to its target, until `finish` moves it there.

    One process begins and finishes it; others that know `staging` may write weights too, each under its own name.
    Leaving the `with` block removes an unfinished draft.
    """

    def __init__(self, staging: Path, target: Path) -> None:
        self.staging = staging
        self.target = target

    @classmethod
    def begin(cls, source_folder: str | Path | None, out: str | Path) -> FolderDraft:
        """Begin a draft with the small files of `source_folder`, if given; refuses a target that slime must not
        replace."""
        target = Path(out).resolve()
        refuse_to_replace(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = cls(target.with_name(f".{target.name}.tmp-{os.getpid()}"), target)
        draft.discard()
        draft.staging.mkdir()
        try:
            if source_folder is not None:
                copy_model_files(source_folder, draft.staging)
        except BaseException:
            draft.discard()
            raise
        return draft

    def writer(
        self, dtype: torch.dtype | None, *, name: str = "part", max_shard_bytes: int = MAX_SHARD_BYTES
    ) -> ShardWriter:
        """A writer of weights into the draft; with a `dtype` they are converted."""
        return ShardWriter(self.staging, prefix=name, max_bytes=max_shard_bytes, dtype=dtype)

    def finish(
        self, dtype: torch.dtype, quantization: JsonObject | None = None, beside: AddFiles | None = None
    ) -> Path:
        """Number the files of all writers, write their dtype into config.json and move the folder to its target;
        `beside` adds more files before the move."""
        _number_shards(self.staging)
        write_config_dtype(self.staging, dtype, quantization)
        if beside is not None:
            beside(self.staging)
        return self.replace_target()

    def replace_target(self) -> Path:
        mark_written(self.staging)
        fsync_path(self.staging)
        refuse_to_replace(self.target)  # again: it may have changed during the write
        replace_folder(self.staging, self.target)
        return self.target

    def __enter__(self) -> FolderDraft:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.discard()

    def discard(self) -> None:
        """Remove the draft, if it is not finished."""
        shutil.rmtree(self.staging, ignore_errors=True)


def _number_shards(folder: Path) -> None:
    """Rename the files of all writers to the names of a model folder, with an index if there are several."""
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
