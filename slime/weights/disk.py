"""Publishes weights through a folder on disk: each version is a whole Hugging Face model folder, `weight_v{N:06d}`.

Invariant: a folder with such a name is complete (it is written under another name and renamed). The newest version on
the engines is kept until a newer one arrives there. Older versions of a run are removed, unless all are kept.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slime.engine.http.client import EngineClient
from slime.models.delta.folder import INDEX_NAME, safetensors_entries
from slime.storage.files import is_marked, mark_written
from slime.weights.publisher import (
    PublisherSettings,
    RunOnClientLoop,
    StagedVersion,
    WeightPublisher,
    WeightSource,
)

_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
_VERSION_NAME = re.compile(r"weight_v(\d{6,})")


@dataclass(frozen=True)
class VersionFolders:
    """Location of versions on disk: under `root`, with the config and tokenizer files of `hf_checkpoint`.

    `on_written` is called with the folder of a version once it is complete.
    """

    root: Path
    hf_checkpoint: Path
    keep_files: bool = False
    on_written: Callable[[Path], None] | None = None


class DiskPublisher(WeightPublisher):
    """Writes each version to a folder, and makes the engines load it."""

    def __init__(
        self,
        source: WeightSource,
        clients: Sequence[EngineClient],
        run_async: RunOnClientLoop,
        folders: VersionFolders,
        settings: PublisherSettings | None = None,
    ) -> None:
        super().__init__(source, clients, run_async, settings=settings)
        self._folders = folders
        self._root = folders.root.absolute()
        self._root.mkdir(parents=True, exist_ok=True)

    @property
    def staged_in(self) -> Path:
        return self._root

    def _stage(self, version: int) -> StagedVersion:
        """Write a version; its files get the names of a checkpoint, and an index."""
        with self._version_folder(version) as unfinished:
            written = export_weights(self._source, unfinished, version)
            names = [f"model-{number:05d}-of-{len(written):05d}.safetensors" for number in range(1, len(written) + 1)]
            weight_map: dict[str, str] = {}
            total_size = 0
            for path, name in zip(written, names, strict=True):
                entries = safetensors_entries(path)
                weight_map.update({entry.name: name for entry in entries})
                total_size += sum(entry.end - entry.start for entry in entries)
                path.rename(unfinished / name)
            index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
            (unfinished / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
            size = file_bytes(unfinished / name for name in names)
            copy_model_assets(self._folders.hf_checkpoint, unfinished)
        return StagedVersion(size, self._folder_of(version))

    def _folder_of(self, version: int) -> Path:
        return self._root / f"weight_v{version:06d}"

    @contextmanager
    def _version_folder(self, version: int) -> Iterator[Path]:
        """Yield a folder to write a version into; it is renamed when the body ends, and removed if the body fails."""
        folder = self._folder_of(version)
        unfinished = self._root / f".{folder.name}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        try:
            yield unfinished
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        mark_written(unfinished)
        _remove_version(folder)
        unfinished.rename(folder)
        if self._folders.on_written is not None:
            self._folders.on_written(folder)

    async def _announce(self, client: EngineClient, staged: StagedVersion, version: int) -> None:
        assert staged.folder is not None
        await client.update_weights_from_disk(
            staged.folder, version, flush_cache=self._settings.flush_cache, timeout_s=self._settings.timeout_s
        )

    def _retire(self, staged: StagedVersion, version: int, *, arrived: bool) -> None:
        for folder in self._root.iterdir() if arrived and not self._folders.keep_files else ():
            match = _VERSION_NAME.fullmatch(folder.name)
            if match and int(match[1]) < version:
                _remove_version(folder)

    def close(self) -> None:
        """Do nothing: the last version stays for inspection and for engine restarts."""


def _remove_version(folder: Path) -> None:
    """Remove a version that a run wrote; a foreign folder with that name stays, and blocks the new version."""
    if is_marked(folder):
        shutil.rmtree(folder, ignore_errors=True)


def export_weights(source: WeightSource, folder: Path, version: int) -> tuple[Path, ...]:
    """Make each rank write the tensors it owns; return all files, sorted."""
    written = source.call("export_weights", out_dir=str(folder), version=version)
    return tuple(sorted(Path(path) for paths in written for path in paths))


def file_bytes(paths: Iterable[Path]) -> int:
    """Return the total size of the files in bytes."""
    return sum(path.stat().st_size for path in paths)


def copy_model_assets(source: Path, target: Path) -> None:
    """Copy config, tokenizer and other small files of a model folder, without weights and their indexes."""
    for path in sorted(source.iterdir()):
        is_weight = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.is_file() and not is_weight and not path.name.startswith("."):
            shutil.copyfile(path, target / path.name)
