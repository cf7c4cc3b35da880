"""Ownership marks of files and folders that a run writes, so that nothing else is overwritten or deleted.

    a saved model, a version of the weights   `.slime-written.json`: its files and their sizes
    a checkpoint                              meta.json with `format` and `model`, and nothing but a checkpoint's files
    a dump                                    the header of a JSON-lines file, the keys of a .pt file

Invariant: code that replaces or removes a folder or file checks it here first, and leaves alone a folder or file
without the mark, or with anything that was added later. `write_durably` and `fsync_path` are for files that must
survive a power cut.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from slime.errors import UserError
from slime.storage.json_types import JsonObject

MANIFEST = ".slime-written.json"
DUMP_FORMATS = ("slime-rollout", "slime-train-dump")
_CHECKPOINT_FILES = re.compile(r"(model|optim|ref)-(r\d+-)?\d+\.safetensors|rng\.safetensors|meta\.json")
_DUMP_KEYS = (b"rollout_id", b"samples")


def mark_written(folder: Path) -> None:
    """Record the files of a folder as written by a run; call it when the folder is complete."""
    sizes = {name: path.stat().st_size for name, path in _list_files(folder) if name != MANIFEST}
    (folder / MANIFEST).write_text(json.dumps({"written_by": "slime", "files": dict(sorted(sizes.items()))}, indent=1))


def is_marked(folder: Path) -> bool:
    """Return True if a run wrote this folder, even if files were added to it since."""
    return _read_manifest(folder) is not None


def find_foreign_file(folder: Path) -> str | None:
    """Return the name of a file in the folder that no run wrote in its present form; None if there is none."""
    written = _read_manifest(folder) or {}
    for name, path in _list_files(folder):
        if name == MANIFEST:
            continue
        size = path.stat().st_size if path.is_file() and not path.is_symlink() else -1
        if written.get(name) != size:
            return name
    return None


def is_checkpoint(folder: Path) -> bool:
    """Return True if a folder is a checkpoint of a run and nothing else."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        names = [path.name for path in folder.iterdir()]
    except (OSError, ValueError):
        return False
    known = isinstance(meta, dict) and "format" in meta and "model" in meta
    return known and all(_CHECKPOINT_FILES.fullmatch(name) for name in names)


def is_dump(path: Path) -> bool:
    """Return True for a dump of a rollout's samples or of its training batch, and for an empty file."""
    try:
        if path.stat().st_size == 0:
            return True
        if path.suffix == ".pt":
            with zipfile.ZipFile(path) as archive:
                pickled = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
                content = b"" if pickled is None else archive.read(pickled)
            return all(key in content for key in _DUMP_KEYS)
        with path.open("rb") as file:
            header = json.loads(file.readline(4096))
        return isinstance(header, dict) and header.get("format") in DUMP_FORMATS
    except (OSError, ValueError, zipfile.BadZipFile):
        return False


def _read_manifest(folder: Path) -> JsonObject | None:
    try:
        found = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    files = found.get("files") if isinstance(found, dict) and found.get("written_by") == "slime" else None
    return files if isinstance(files, dict) else None


def _list_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield files, links and empty folders with their names within `folder`, sorted."""
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink() and any(path.iterdir()):
            yield from ((f"{path.name}/{name}", inner) for name, inner in _list_files(path))
        else:
            yield path.name, path


class FolderTaken(UserError):
    """The path of a folder to be saved has something that no run saved there."""


def refuse_to_replace(target: Path) -> None:
    """Raise `FolderTaken` if the path has anything that no run saved there."""
    if target.exists() and not target.is_dir():
        raise FolderTaken(f"{target} is a file: choose another path for the saved model")
    foreign = find_foreign_file(target)
    if foreign is not None:
        raise FolderTaken(f"{target} has {foreign}, which no run saved there: choose another path for the saved model")


def fsync_path(path: Path) -> None:
    """Wait until a file, or the list of names of a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file atomically and durably: after a crash it is complete or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(path.parent)
