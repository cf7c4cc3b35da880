"""Computes the changes in the folder given to a sandbox: the changed files, and a patch that `git apply` accepts.

With an overlay, only its upper layer is walked, which holds exactly what was written; with a copy, both folders are
compared byte by byte. File times and sizes are not trusted, because programs in the sandbox can set them. Names and
depths are not trusted either: no link is followed, and folders may be nested deeper than a path or a stack allows.
"""

from __future__ import annotations

import base64
import difflib
import os
import socket
import stat
import zlib
from collections.abc import Iterator

try:  # imported at every start, and hashlib takes five times as long
    from _sha1 import sha1  # type: ignore[import-not-found]
except ImportError:
    from hashlib import sha1

from . import fd_messages

TYPE_CHECKING = False  # importing `typing` would take a fifth of a start
if TYPE_CHECKING:
    from .fd_messages import JsonMapping

_MAX_FILE_BYTES = 1 << 20
_MAX_NAME_BYTES = 8 << 20
"""Limit on the total bytes of all reported paths."""
_LINK = 0o120000
_NO_FILE = "0" * 40
_NO_NEWLINE = "\\ No newline at end of file\n"
_BINARY_LINE = 52
_OPEN_FOLDERS = 64
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class FolderTree:
    """A folder tree that is opened one name at a time, so that paths may have any length and no link is followed.

    The folders opened last stay open, so a walk opens each folder once.
    """

    def __init__(self, base: int) -> None:
        self.base = base
        self.parts: list[str] = []
        self.opened: dict[int, int] = {}
        """Open descriptors by depth, for the deepest folders of `parts`."""

    def folder(self, path: str) -> int | None:
        """Open a folder of the tree; this object owns the descriptor. None if there is no such folder."""
        parts = path.split("/") if path else []
        depth = 0
        for old, new in zip(self.parts, parts, strict=False):
            if old != new:
                break
            depth += 1
        for deeper in [number for number in self.opened if number > depth]:
            os.close(self.opened.pop(deeper))
        depth = max(self.opened, default=0)
        self.parts = parts[:depth]
        for name in parts[depth:]:
            above = self.opened.get(depth, self.base)
            try:
                descriptor = os.open(name, _FOLDER | getattr(os, "O_PATH", os.O_RDONLY), dir_fd=above)
            except OSError:
                return None
            depth += 1
            self.parts.append(name)
            self.opened[depth] = descriptor
            if len(self.opened) > _OPEN_FOLDERS:
                os.close(self.opened.pop(next(iter(self.opened))))
        return self.opened.get(depth, self.base)

    def _parent(self, path: str) -> tuple[int | None, str]:
        folder, _, name = path.rpartition("/")
        return self.folder(folder), name

    def names(self, path: str) -> list[str]:
        """List the names in a folder; empty if the path is not a folder."""
        folder = self.folder(path)
        if folder is None:
            return []
        try:
            descriptor = os.open(".", os.O_RDONLY | _FOLDER, dir_fd=folder)
        except OSError:
            return []
        try:
            return os.listdir(descriptor)
        finally:
            os.close(descriptor)

    def status(self, path: str) -> os.stat_result | None:
        """Status of a file, link or folder; None if it does not exist."""
        folder, name = self._parent(path)
        if folder is None:
            return None
        try:
            return os.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError:
            return None

    def is_folder(self, path: str) -> bool:
        status = self.status(path)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def open(self, path: str) -> int | None:
        """Open a file; the caller owns the descriptor. None if the file cannot be opened."""
        folder, name = self._parent(path)
        if folder is None:
            return None
        try:
            return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        except OSError:
            return None

    def link(self, path: str) -> bytes:
        folder, name = self._parent(path)
        return os.fsencode(os.readlink(name, dir_fd=folder))

    def files(self, path: str, *, deep: bool = True) -> Iterator[str]:
        """Yield the paths of all entries that are not folders, in a folder and, with `deep`, in its subfolders."""
        folders = [path]
        while folders:
            folder = folders.pop()
            for name in self.names(folder):
                below = os.path.join(folder, name)
                if not self.is_folder(below):
                    yield below
                elif deep:
                    folders.append(below)

    def folders(self) -> Iterator[str]:
        """Yield the paths of this folder and all folders below it."""
        folders = [""]
        while folders:
            folder = folders.pop()
            yield folder
            below = [os.path.join(folder, name) for name in self.names(folder)]
            folders.extend(path for path in below if self.is_folder(path))


class FileState:
    """State of a file in one of the two folders: its mode, and the bytes of a regular file or the target of a link."""

    def __init__(self, mode: int, content: bytes | None) -> None:
        self.mode = mode
        self.content = content
        """None: the file is too large for a patch, or is neither a regular file nor a link."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileState) and (self.mode, self.content) == (other.mode, other.content)

    def __hash__(self) -> int:
        return hash((self.mode, self.content))


def answer(spec: JsonMapping, result: socket.socket, lower: int | None, present: int | None, upper: int | None) -> None:
    """Respond with the changed paths and the patch."""
    if lower is None:
        fd_messages.send(result, {"changes": [], "patch": 0, "truncated": False})
        return
    if present is None:
        present = os.open(spec["folder"], os.O_RDONLY | os.O_DIRECTORY)
    old, new = FolderTree(lower), FolderTree(present)
    changes: list[tuple[str, str]] = []
    patch = bytearray()
    named = 0
    truncated = False
    for path in sorted(candidate_paths(old, new, None if upper is None else FolderTree(upper)) - set(spec["without"])):
        before, after = _file_state(old, path), _file_state(new, path)
        if before == after and (before is None or before.content is not None or _have_same_bytes(old, new, path)):
            continue
        named += len(os.fsencode(path))
        if named > _MAX_NAME_BYTES:
            truncated = True
            break
        changes.append(("added" if before is None else "deleted" if after is None else "modified", path))
        text = _format_patch(path, before, after)
        if text is None or len(patch) + len(text) > spec["most"]:
            truncated = True
        else:
            patch += text
    fd_messages.send(result, {"changes": changes, "patch": len(patch), "truncated": truncated})
    result.sendall(patch)


def candidate_paths(lower: FolderTree, present: FolderTree, upper: FolderTree | None) -> set[str]:
    """Collect the paths of files and links that may differ."""
    if upper is None:
        return set(lower.files("")) | set(present.files(""))
    found = set()
    for folder in upper.folders():
        for tree in (lower, present):
            found |= set(tree.files(folder, deep=False))
        for name in lower.names(folder):  # folders that were removed or replaced by another kind of file
            path = os.path.join(folder, name)
            if lower.is_folder(path) and not present.is_folder(path):
                found |= set(lower.files(path))
    return found


def _file_state(tree: FolderTree, path: str) -> FileState | None:
    status = tree.status(path)
    if status is None or stat.S_ISDIR(status.st_mode):
        return None
    mode = 0o100755 if status.st_mode & 0o100 else 0o100644
    if stat.S_ISLNK(status.st_mode):
        return FileState(_LINK, tree.link(path))
    if not stat.S_ISREG(status.st_mode):
        return FileState(status.st_mode, None)
    if status.st_size > _MAX_FILE_BYTES or (descriptor := tree.open(path)) is None:
        return FileState(mode, None)
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(_MAX_FILE_BYTES + 1)
    return FileState(mode, content if len(content) <= _MAX_FILE_BYTES else None)


def _have_same_bytes(one: FolderTree, other: FolderTree, path: str) -> bool:
    """Compare the bytes of two files that are too large for a patch; unreadable files count as changed."""
    if not stat.S_ISREG(getattr(one.status(path), "st_mode", 0)):
        return True  # both have the same mode, such as two pipes
    first, second = one.open(path), other.open(path)
    if first is None or second is None:
        for descriptor in (first, second):
            if descriptor is not None:
                os.close(descriptor)
        return False
    with os.fdopen(first, "rb") as left, os.fdopen(second, "rb") as right:
        while True:
            chunk = left.read(1 << 20)
            if chunk != right.read(1 << 20):
                return False
            if not chunk:
                return True


def _format_patch(path: str, before: FileState | None, after: FileState | None) -> bytes | None:
    """Format the change of one file as a git patch; None if a patch cannot hold it."""
    if (before and before.content is None) or (after and after.content is None):
        return None
    if before and after and (before.mode == _LINK) != (after.mode == _LINK):  # git cannot turn a file into a link
        return (_format_patch(path, before, None) or b"") + (_format_patch(path, None, after) or b"")
    names = (_quote_name(f"a/{path}"), _quote_name(f"b/{path}"))
    lines = [f"diff --git {names[0]} {names[1]}\n"]
    if before is None and after is not None:
        lines.append(f"new file mode {after.mode:06o}\n")
    elif after is None and before is not None:
        lines.append(f"deleted file mode {before.mode:06o}\n")
    elif before is not None and after is not None and before.mode != after.mode:
        lines += [f"old mode {before.mode:06o}\n", f"new mode {after.mode:06o}\n"]
    old = b"" if before is None else before.content or b""
    new = b"" if after is None else after.content or b""
    try:
        texts = [_split_git_lines(content.decode()) for content in (old, new) if b"\0" not in content]
    except UnicodeDecodeError:
        texts = []
    if old == new:
        pass
    elif len(texts) < 2:
        lines += _format_binary_patch(before, after)
    else:
        lines.append(f"--- {_with_end_tab(names[0])}\n" if before else "--- /dev/null\n")
        lines.append(f"+++ {_with_end_tab(names[1])}\n" if after else "+++ /dev/null\n")
        for line in list(difflib.unified_diff(texts[0], texts[1]))[2:]:
            lines.append(line if line.endswith("\n") else f"{line}\n{_NO_NEWLINE}")
    return "".join(lines).encode()


def _split_git_lines(text: str) -> list[str]:
    """Split text into lines as git does: only a line feed ends a line."""
    *whole, last = text.split("\n")
    return [f"{line}\n" for line in whole] + ([last] if last else [])


def _format_binary_patch(before: FileState | None, after: FileState | None) -> list[str]:
    """Format a binary patch with all the new bytes, which git applies to a file with the old ones."""

    def number(entry: FileState | None) -> str:
        content = entry.content or b"" if entry else b""
        return sha1(b"blob %d\0" % len(content) + content).hexdigest() if entry else _NO_FILE

    content = after.content or b"" if after else b""
    lines = [f"index {number(before)}..{number(after)}\n", "GIT binary patch\n", f"literal {len(content)}\n"]
    packed = zlib.compress(content)
    for start in range(0, len(packed), _BINARY_LINE):
        part = packed[start : start + _BINARY_LINE]
        size = chr(ord("A") + len(part) - 1) if len(part) <= 26 else chr(ord("a") + len(part) - 27)
        lines.append(f"{size}{base64.b85encode(part, pad=True).decode()}\n")
    return [*lines, "\n"]


def _quote_name(path: str) -> str:
    """Format a path as git does: quoted, with octal escapes, if it has special characters or is not valid text."""
    raw = os.fsencode(path)
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = ""
    if text and not any(byte < 32 or byte == 127 or byte in b'"\\' for byte in raw):
        return text
    return '"' + "".join(chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\{b:03o}" for b in raw) + '"'


def _with_end_tab(name: str) -> str:
    """Append the tab that marks the end of a name with spaces."""
    return f"{name}\t" if " " in name else name
