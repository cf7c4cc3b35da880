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

from slime.models.files import fsync_path
from slime.models.shards import NamedTensors, ShardWriter, iter_named, write_index
from slime.models.taken import refuse_to_replace
from slime.owned import MANIFEST, mark_written

MAX_SHARD_BYTES = 5 * 1000**3
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx", ".index.json")
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
    beside: Callable[[Path], object] | None = None,
) -> Path:
    """Save HF-named tensors (a mapping or a stream of pairs) with the small files of `source_folder` to `out`.

    They are written in `dtype`; with `quantization`, which is asked for the config's entry at the end, as they are.
    `beside` puts more files into the folder before it is in its place.
    """
    target = Path(out).resolve()
    refuse_to_replace(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        copy_model_files(source_folder, staging)
        _write_weights(state_dict, staging, dtype if quantization is None else None, max_shard_bytes)
        write_config_dtype(staging, dtype, None if quantization is None else quantization())
        if beside is not None:
            beside(staging)
        mark_written(staging)
        fsync_path(staging)
        refuse_to_replace(target)  # it took a while
        replace_folder(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return target


def _write_weights(state_dict: NamedTensors, folder: Path, dtype: torch.dtype | None, max_shard_bytes: int) -> None:
    writer = ShardWriter(folder, prefix="part", max_bytes=max_shard_bytes, dtype=dtype)
    for name, tensor in iter_named(state_dict):
        writer.add(name, tensor)
    paths = writer.finish()
    if len(paths) == 1:
        paths[0].rename(folder / "model.safetensors")
        return
    renamed = {path.name: f"model-{i:05d}-of-{len(paths):05d}.safetensors" for i, path in enumerate(paths, start=1)}
    for path in paths:
        path.rename(folder / renamed[path.name])
    writer.weight_map = {name: renamed[file] for name, file in writer.weight_map.items()}
    write_index(writer, folder / "model.safetensors.index.json")
