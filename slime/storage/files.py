"""The marks by which a run knows what a run wrote, so that nothing else is ever overwritten or deleted.

    a saved model, a version of the weights   `.slime-written.json`: its files and their sizes
    a checkpoint                              meta.json with `format` and `model`, and nothing but a checkpoint's files
    a dump                                    the header of a JSON-lines file, the keys of a .pt file

Invariant: whoever replaces or removes a folder or file asks here first, and leaves alone what does not carry the mark,
or holds anything that was put there later.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.errors import UserError

MANIFEST = ".slime-written.json"
DUMP_FORMATS = ("slime-rollout", "slime-train-dump")
_CHECKPOINT_FILES = re.compile(r"(model|optim|ref)-(r\d+-)?\d+\.safetensors|rng\.safetensors|meta\.json")
_DUMP_KEYS = (b"rollout_id", b"samples")


def mark_written(folder: Path) -> None:
    """Record what is in a folder as written by a run; call it when all of it is there."""
    sizes = {name: path.stat().st_size for name, path in _files(folder) if name != MANIFEST}
    (folder / MANIFEST).write_text(json.dumps({"written_by": "slime", "files": dict(sorted(sizes.items()))}, indent=1))


def is_marked(folder: Path) -> bool:
    """Whether a run wrote this folder, whatever was added to it since."""
    return _manifest(folder) is not None


def not_from_a_run(folder: Path) -> str | None:
    """Something in a folder that no run wrote as it is now; None when there is nothing such, or nothing at all."""
    written = _manifest(folder) or {}
    strangers = (name for name, path in _files(folder) if name != MANIFEST and written.get(name) != _size(path))
    return next(strangers, None)


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint of a run and nothing else."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        names = [path.name for path in folder.iterdir()]
    except (OSError, ValueError):
        return False
    known = isinstance(meta, dict) and "format" in meta and "model" in meta
    return known and all(_CHECKPOINT_FILES.fullmatch(name) for name in names)


def is_dump(path: Path) -> bool:
    """Whether a file holds the samples of a rollout, or what training made of them; an empty one holds nothing."""
    try:
        if path.stat().st_size == 0:
            return True
        return _is_pt_dump(path) if path.suffix == ".pt" else _is_jsonl_dump(path)
    except (OSError, ValueError, zipfile.BadZipFile):
        return False


def _is_jsonl_dump(path: Path) -> bool:
    with path.open("rb") as file:
        header = json.loads(file.readline(4096))
    return isinstance(header, dict) and header.get("format") in DUMP_FORMATS


def _is_pt_dump(path: Path) -> bool:
    with zipfile.ZipFile(path) as archive:
        pickled = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
        content = b"" if pickled is None else archive.read(pickled)
    return all(key in content for key in _DUMP_KEYS)


def _manifest(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    files = found.get("files") if isinstance(found, dict) and found.get("written_by") == "slime" else None
    return files if isinstance(files, dict) else None


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """All that is not a folder, links, and folders with nothing in them, by their names within `folder`, in order."""
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink() and any(path.iterdir()):
            yield from ((f"{path.name}/{name}", inner) for name, inner in _files(path))
        else:
            yield path.name, path


def _size(path: Path) -> int:
    """Of a plain file; -1 for what is none."""
    return path.stat().st_size if path.is_file() and not path.is_symlink() else -1


# Paths at which a folder cannot be saved, because something is there that no run put there.


class FolderTaken(UserError):
    """There is something at the path of a folder to be saved that no run put there."""


def refuse_to_replace(target: Path) -> None:
    """Raise for a path with anything else than what a run saved there."""
    if target.exists() and not target.is_dir():
        raise FolderTaken(f"{target} is a file: choose another path for the saved model")
    stranger = not_from_a_run(target)
    if stranger is not None:
        raise FolderTaken(f"{target} has {stranger}, which no run saved there: choose another path for the saved model")


# Files that must outlive a power cut.


def fsync_path(path: Path) -> None:
    """Return when the file, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
