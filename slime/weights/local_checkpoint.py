"""A model folder that deltas are applied to in place, for engines that can only load whole folders.

The invariant: `.weight_sync/state.json` names the version of the folder only while all of its bytes are that version's.
It says `applying` from before the first byte changes until after the last one is written through, so a folder in which
somebody died half-way is recognised, and made again from a whole version. `.weight_sync/files.json` names the files
that updates have put there: only these are ever removed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slime.config.paths import LOCAL_FILES
from slime.errors import RunFailed
from slime.models.delta.folder import BadDelta, read_index
from slime.storage.files import MANIFEST, fsync_path

_FILES = LOCAL_FILES
_SYNC = Path(LOCAL_FILES).parts[0]
_STATE = f"{_SYNC}/state.json"


class LocalCheckpointBroken(RunFailed):
    """The folder cannot take this delta: another version, damaged files, or half of an earlier delta."""


class LocalCheckpoint:
    """The folder, its state and its lock; one process changes it at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    @property
    def version(self) -> int | None:
        """The version of all its bytes; None if there is none such."""
        try:
            state = json.loads((self.folder / _STATE).read_text())
            return int(state["version"]) if state["status"] == "clean" else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def rebuild(self, whole: Path, version: int) -> None:
        """Make it a copy of the version folder `whole`."""
        files = sorted(path.name for path in whole.iterdir() if path.is_file() and path.name != MANIFEST)
        with self._locked():
            old = self._files()
            strangers = sorted(path.name for path in self.folder.iterdir() if path.name not in {_SYNC, *old})
            if strangers:
                raise RunFailed(
                    f"{self.folder} has {strangers[0]}, which no weight update put there: give "
                    "--update-weight-local-checkpoint-dir an empty folder"
                )
            self._write(_FILES, sorted({*old, *files}))
            self._note(version, "applying")
            for name in old:
                (self.folder / name).unlink(missing_ok=True)
            for name in files:
                shutil.copy2(whole / name, self.folder / name)
                if name.endswith(".safetensors"):
                    fsync_path(self.folder / name)
            self._write(_FILES, files)
            self._note(version, "clean")

    def apply(self, delta: Path) -> None:
        """Bring it to the version of a delta folder."""
        from slime.models.delta.apply import apply_to_files  # zstandard and xxhash: for deltas alone

        try:
            index = read_index(delta)
            if index is None:
                raise BadDelta(f"{delta} holds no delta")
            index.require_base(self.version, delta=delta, owner="the folder")
            with self._locked():
                self._note(index.version, "applying")
                apply_to_files(self.folder, delta, index)
                self._note(index.version, "clean")
        except (OSError, ValueError) as cause:
            raise LocalCheckpointBroken(f"{self.folder} cannot take a delta: {cause}") from cause

    def _files(self) -> list[str]:
        """The files that updates have put into the folder."""
        try:
            files = json.loads((self.folder / _FILES).read_text())
        except (OSError, ValueError):
            return []
        return [name for name in files if Path(name).name == name]

    def _note(self, version: int, status: str) -> None:
        self._write(_STATE, {"version": f"{version:06d}", "status": status})

    def _write(self, name: str, content: object) -> None:
        path = self.folder / name
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(content))
        fsync_path(fresh)
        os.replace(fresh, path)
        fsync_path(path.parent)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        (self.folder / _SYNC).mkdir(parents=True, exist_ok=True)
        with (self.folder / _SYNC / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
