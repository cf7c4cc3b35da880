"""Copies folders of the driver's machine to other nodes, unless they are there already.

Invariant: two folders count as the same if every file has the same name and size and every small file the same content.
A copy gets its final name only when it is complete, so a cache entry is never partial, even if two nodes share one home
folder.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.errors import UserError

SMALL_BYTES = 4 * 2**20
CHUNK_BYTES = 8 * 2**20
CACHE_VARIABLE = "SLIME_NODE_CACHE"
LEFT_OUT = ("__pycache__",)
OWN_PACKAGE = __name__.partition(".")[0]
MOST_CODE_BYTES = 64 * 2**20

AgentCall = Callable[..., Any]
"""Calls a method of a node's agent by its name."""


@dataclass(frozen=True)
class Inventory:
    """The files of a folder, or a single file (named ""): name, size, and for a small file the hash of its content."""

    files: tuple[tuple[str, int, str], ...]

    @property
    def size(self) -> int:
        return sum(size for _, size, _ in self.files)

    @property
    def key(self) -> str:
        return hashlib.sha256(repr(self.files).encode()).hexdigest()[:24]


def inventory(path: Path) -> Inventory | None:
    """Take the inventory of a file or folder; None if it does not exist."""
    if path.is_file():
        return Inventory((_entry("", path),))
    if not path.is_dir():
        return None
    names: list[str] = []
    for root, folders, files in os.walk(path, followlinks=True):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        names += (os.path.relpath(os.path.join(root, file), path) for file in files)
    return Inventory(tuple(_entry(name, path / name) for name in sorted(names)))


def code_inventory(folder: Path) -> Inventory | None:
    """Take the inventory of the user's Python files in a folder and its packages; None if it is not a folder."""
    if not folder.is_dir():
        return None
    names: list[str] = []
    for root, folders, files in os.walk(folder):
        inside = [name for name in folders if name not in LEFT_OUT and name.isidentifier()]
        folders[:] = [name for name in inside if os.path.isfile(os.path.join(root, name, "__init__.py"))]
        names += (os.path.relpath(os.path.join(root, file), folder) for file in files if file.endswith(".py"))
    own = [name for name in sorted(names) if not name.startswith(f"{OWN_PACKAGE}{os.sep}")]
    return Inventory(tuple(_entry(name, folder / name) for name in own))


def _entry(name: str, path: Path) -> tuple[str, int, str]:
    size = path.stat().st_size
    return name, size, hashlib.sha256(path.read_bytes()).hexdigest() if size <= SMALL_BYTES else ""


def node_cache() -> Path:
    """Return the folder for copies on a node: `SLIME_NODE_CACHE`, else below the home folder."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "slime" / "node")


class FolderTransfer:
    """A folder that is being copied into a node's cache. Its inventory's key is its name, so it is copied only once."""

    def __init__(self, cache: Path, name: str, expected: Inventory) -> None:
        self.expected = expected
        self.final = cache / f"{name}-{expected.key}" / name
        self._partial = cache / f".{expected.key}-{secrets.token_hex(4)}"

    @property
    def is_there(self) -> bool:
        return inventory(self.final) == self.expected

    def begin(self) -> None:
        self._partial.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._partial.parent).free
        if free < self.expected.size:
            raise UserError(
                f"{self._partial.parent} has {free / 2**30:.1f} GiB left, and {self.final.name} has "
                f"{self.expected.size / 2**30:.1f} GiB: make room, or set {CACHE_VARIABLE} to another folder there"
            )
        if self.final.parent.exists():  # with different content
            shutil.rmtree(self.final.parent)
        self._partial.mkdir()
        for name, _, _ in self.expected.files:
            place = self._place(name)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()

    def write(self, name: str, data: bytes) -> None:
        if name not in {file for file, _, _ in self.expected.files}:
            raise UserError(f"{name} is not in the inventory of {self.final.name}")
        with self._place(name).open("ab") as file:
            file.write(data)

    def finish(self) -> None:
        """Give the copy its final name, unless another process has done so already."""
        arrived = inventory(self._partial / self.final.name)
        if arrived != self.expected:
            shutil.rmtree(self._partial, ignore_errors=True)
            raise UserError(f"{self.final.name} changed while it was copied: start again")
        try:
            os.rename(self._partial, self.final.parent)
        except OSError:
            if not self.is_there:
                raise
            shutil.rmtree(self._partial, ignore_errors=True)

    def _place(self, name: str) -> Path:
        whole = self._partial / self.final.name
        return whole / name if name else whole


def copy_to_node(path: Path, call: AgentCall) -> str:
    """Return the path of this file or folder on the node of `call`: the same path if it is the same there, else a
    copy."""
    ours = inventory(path)
    if ours is None:
        raise UserError(f"{path} is not there")
    return _copy_if_missing(path, ours, "inventory", call)


def copy_code_to_node(folder: Path, call: AgentCall) -> str:
    """Do the same for only the modules in a folder; processes started there from now on can import them."""
    ours = code_inventory(folder)
    if ours is None:
        raise UserError(f"{folder} is not there")
    if ours.size > MOST_CODE_BYTES:
        raise UserError(
            f"its Python files have {ours.size >> 20} MiB: put the run's functions into a folder of their own"
        )
    there = _copy_if_missing(folder, ours, "code_inventory", call)
    call("search_also", [there])
    return there


def _copy_if_missing(path: Path, ours: Inventory, look: str, call: AgentCall) -> str:
    if call(look, str(path)) == ours.key:
        return str(path)
    final, there = call("arrive", path.name, ours.files)
    if not there:
        for name, _, _ in ours.files:
            with (path / name if name else path).open("rb") as file:
                while data := file.read(CHUNK_BYTES):
                    call("write", final, name, data)
        call("arrived", final)
    return str(final)
