"""Publishes weights through folders: each version is a folder `weight_v{N:06d}`, on disk or in shared memory.

A version contains a whole Hugging Face model folder; or only the trainers' files, of which embedded engines on this
machine get the paths; or a LoRA adapter in PEFT's format, which embedded engines merge into the weights of their model
folder. (SGLang accepts tensors from other processes only as pickles, which are never sent here, so it always gets a
whole model folder.)

Invariant: a folder with such a name is complete (it is written under another name and renamed). On disk the newest
version on the engines is kept until a newer one arrives there, and older versions of a run are removed, unless all are
kept. In memory a version exists only until the end of its update.
Invariant: an engine that merged an adapter has the bytes that the trainers would have sent as whole weights, regardless
of its earlier weights; a restarted engine gets the adapter like any other.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from slime.cluster.memory.staging import StagingFolder, remove_stale
from slime.engine.http.client import EngineClient, call_all
from slime.models.delta.folder import INDEX_NAME, safetensors_entries
from slime.storage.files import is_marked, mark_written
from slime.weights.publisher import PublisherSettings, StagedPublisher, StagedVersion, Swapped

ADAPTER_NAME = "slime"
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
_VERSION_NAME = re.compile(r"weight_v(\d{6,})")

Contents = Literal["model", "tensors", "adapter"]
"""What a version contains: a model folder, only its weight files, or an adapter."""


@dataclass(frozen=True)
class VersionFolders:
    """Location of versions: under `root`, with the config and tokenizer files of `hf_checkpoint`.

    `on_written` is called with the folder of a version once it is complete.
    """

    root: Path
    hf_checkpoint: Path
    in_memory: bool = False
    keep_files: bool = False
    on_written: Callable[[Path], None] | None = None


class FolderPublisher(StagedPublisher):
    """Writes each version to a folder, and makes the engines load it."""

    def __init__(self, settings: PublisherSettings, folders: VersionFolders, contents: Contents = "model") -> None:
        super().__init__(settings)
        self._folders = folders
        self._contents = contents
        self._copies: dict[EngineClient, Path] = {}
        self._staging: StagingFolder | None = None
        self._root = folders.root.absolute()
        if folders.in_memory:
            remove_stale(folders.root)
            self._staging = StagingFolder(folders.root, "weights")
            self._root = self._staging.path
        self._root.mkdir(parents=True, exist_ok=True)

    @property
    def staged_in(self) -> Path:
        return self._root

    def _stage(self, version: int, *, whole: bool) -> StagedVersion:
        verb = "export_adapter" if self._contents == "adapter" else "export_weights"
        with self._version_folder(version) as unfinished:
            answers = self._source.call(verb, out_dir=str(unfinished), version=version)
            files = sorted(Path(path) for paths in answers for path in paths)
            if self._contents == "model":
                files = self._complete_model(unfinished, files)
            size = file_bytes(files)
        folder = self._folder_of(version)
        return StagedVersion(size, folder, tuple(folder / path.name for path in files))

    def _complete_model(self, folder: Path, written: list[Path]) -> list[Path]:
        """Give the files the names of a checkpoint; add an index, and the small files of the model folder."""
        files = [folder / f"model-{i:05d}-of-{len(written):05d}.safetensors" for i in range(1, len(written) + 1)]
        weight_map: dict[str, str] = {}
        total_size = 0
        for path, file in zip(written, files, strict=True):
            entries = safetensors_entries(path)
            weight_map.update({entry.name: file.name for entry in entries})
            total_size += sum(entry.end - entry.start for entry in entries)
            path.rename(file)
        index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
        copy_model_assets(self._folders.hf_checkpoint, folder)
        return files

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

    async def _pause_and_load(self, clients: Sequence[EngineClient], staged: StagedVersion, version: int) -> Swapped:
        """Update the engines; those that cannot read this machine's files get copies of the staged folder."""
        delivery, folder = self._settings.delivery, staged.folder
        if delivery is None or folder is None:
            return await super()._pause_and_load(clients, staged, version)
        copies = await call_all(clients, lambda client: delivery.deliver(client, folder))
        self._copies = {client: copy for client, copy in zip(clients, copies, strict=True) if copy is not None}
        try:
            return await super()._pause_and_load(clients, staged, version)
        finally:
            copied, self._copies = self._copies, {}
            for client, copy in copied.items():
                await delivery.forget(client, copy)

    async def _transfer(
        self, clients: Sequence[EngineClient], staged: StagedVersion, version: int
    ) -> Sequence[EngineClient]:
        await call_all(clients, lambda client: self._announce(client, self._seen_by(client, staged), version))
        return ()

    def _seen_by(self, client: EngineClient, staged: StagedVersion) -> StagedVersion:
        """Return the staged version as the engine finds it: in its own copy, if it has one."""
        copy = self._copies.get(client)
        if copy is None:
            return staged
        return replace(staged, folder=copy, files=tuple(copy / path.name for path in staged.files))

    async def _announce(self, client: EngineClient, staged: StagedVersion, version: int) -> None:
        """Make one engine load the staged weights."""
        assert staged.folder is not None
        flush_cache, timeout_s = self._settings.flush_cache, self._settings.timeout_s
        if self._contents == "tensors":
            await client.update_weights_from_tensor_files(
                staged.files, version, flush_cache=flush_cache, timeout_s=timeout_s
            )
        elif self._contents == "adapter":
            await client.load_lora_adapter(
                ADAPTER_NAME, staged.folder, version, flush_cache=flush_cache, timeout_s=timeout_s
            )
        else:
            await client.update_weights_from_disk(staged.folder, version, flush_cache=flush_cache, timeout_s=timeout_s)

    def _retire(self, staged: StagedVersion, version: int, *, arrived: bool) -> None:
        if self._staging is not None:
            assert staged.folder is not None
            shutil.rmtree(staged.folder, ignore_errors=True)
            return
        for folder in self._root.iterdir() if arrived and not self._folders.keep_files else ():
            match = _VERSION_NAME.fullmatch(folder.name)
            if match and int(match[1]) < version:
                _remove_version(folder)

    def close(self) -> None:
        """Remove what is in memory; on disk the last version stays for inspection and for engine restarts."""
        if self._staging is not None:
            self._staging.close()


def _remove_version(folder: Path) -> None:
    """Remove a version that a run wrote; a foreign folder with that name stays, and blocks the new version."""
    if is_marked(folder):
        shutil.rmtree(folder, ignore_errors=True)


def file_bytes(paths: Iterable[Path]) -> int:
    """Return the total size of the files in bytes."""
    return sum(path.stat().st_size for path in paths)


def copy_model_assets(source: Path, target: Path) -> None:
    """Copy config, tokenizer and other small files of a model folder, without weights and their indexes."""
    for path in sorted(source.iterdir()):
        is_weight = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.is_file() and not is_weight and not path.name.startswith("."):
            shutil.copyfile(path, target / path.name)
