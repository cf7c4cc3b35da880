"""What a sandbox changed in the folder that it was given: which files, and for texts a patch that `git apply` takes.

With an overlay only its upper layer is walked, which holds what was written and nothing else; with a copy both folders
are compared byte by byte. Times and sizes are not trusted: what runs in the sandbox can set them.
"""

from __future__ import annotations

import difflib
import os
import socket
import stat
from collections.abc import Iterator, Mapping

from . import wire

TYPE_CHECKING = False  # importing `typing` would take a fifth of a start
if TYPE_CHECKING:
    from typing import Any

_LARGEST_TEXT = 1 << 20
_NO_NEWLINE = "\\ No newline at end of file\n"


class Entry:
    """A file as one of the two folders has it: its mode, and the bytes of a plain file or the target of a link."""

    def __init__(self, mode: int, content: bytes | None) -> None:
        self.mode = mode
        self.content = content
        """None: too large to be shown."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Entry) and (self.mode, self.content) == (other.mode, other.content)

    def __hash__(self) -> int:
        return hash((self.mode, self.content))


def answer(
    spec: Mapping[str, Any], result: socket.socket, lower: int | None, present: int | None, upper: int | None
) -> None:
    """Answer with the changed paths and the patch."""
    if lower is None:
        wire.send(result, {"changes": [], "patch": 0, "truncated": False})
        return
    if present is None:
        present = os.open(spec["folder"], os.O_RDONLY | os.O_DIRECTORY)
    changes: list[tuple[str, str]] = []
    patch = bytearray()
    truncated = False
    for path in sorted(candidates(lower, present, upper) - set(spec["without"])):
        before, after = _entry(lower, path), _entry(present, path)
        if before == after and (before is None or before.content is not None or _same(lower, present, path)):
            continue
        changes.append((_kind(before, after), path))
        text = _patch(path, before, after)
        if len(patch) + len(text) > spec["most"]:
            truncated = True
        else:
            patch += text
    wire.send(result, {"changes": changes, "patch": len(patch), "truncated": truncated})
    result.sendall(patch)


def candidates(lower: int, present: int, upper: int | None) -> set[str]:
    """The paths, files and links only, that may differ."""
    if upper is None:
        return set(_files(lower, "")) | set(_files(present, ""))
    found = set()
    for folder in _written_folders(upper, ""):
        for base in (lower, present):
            found |= set(_files(base, folder, deep=False))
        for name in _names(lower, folder):  # folders that are gone, or something else now
            path = os.path.join(folder, name)
            if _is_folder(lower, path) and not _is_folder(present, path):
                found |= set(_files(lower, path))
    return found


def _written_folders(upper: int, folder: str) -> Iterator[str]:
    yield folder
    for name in _names(upper, folder):
        path = os.path.join(folder, name)
        if _is_folder(upper, path):
            yield from _written_folders(upper, path)


def _files(base: int, folder: str, *, deep: bool = True) -> Iterator[str]:
    for name in _names(base, folder):
        path = os.path.join(folder, name)
        if _is_folder(base, path):
            if deep:
                yield from _files(base, path)
        else:
            yield path


def _names(base: int, folder: str) -> list[str]:
    try:
        descriptor = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=base)
    except OSError:
        return []
    try:
        return os.listdir(descriptor)
    finally:
        os.close(descriptor)


def _status(base: int, path: str) -> os.stat_result | None:
    try:
        return os.stat(path, dir_fd=base, follow_symlinks=False)
    except OSError:
        return None


def _is_folder(base: int, path: str) -> bool:
    status = _status(base, path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def _entry(base: int, path: str) -> Entry | None:
    status = _status(base, path)
    if status is None or stat.S_ISDIR(status.st_mode):
        return None
    mode = 0o100755 if status.st_mode & 0o100 else 0o100644
    if stat.S_ISLNK(status.st_mode):
        return Entry(0o120000, os.fsencode(os.readlink(path, dir_fd=base)))
    if not stat.S_ISREG(status.st_mode):
        return Entry(status.st_mode, b"")
    if status.st_size > _LARGEST_TEXT:
        return Entry(mode, None)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=base)
    except OSError:
        return Entry(mode, None)
    with os.fdopen(descriptor, "rb") as file:
        return Entry(mode, file.read(_LARGEST_TEXT))


def _same(one: int, other: int, path: str) -> bool:
    """Whether two large files have the same bytes."""
    try:
        first = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=one)
        second = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=other)
    except OSError:
        return False
    with os.fdopen(first, "rb") as left, os.fdopen(second, "rb") as right:
        while True:
            chunk = left.read(1 << 20)
            if chunk != right.read(1 << 20):
                return False
            if not chunk:
                return True


def _kind(before: Entry | None, after: Entry | None) -> str:
    if before is None:
        return "added"
    return "deleted" if after is None else "modified"


def _patch(path: str, before: Entry | None, after: Entry | None) -> bytes:
    name = path.encode("utf-8", "replace").decode()
    lines = [f"diff --git a/{name} b/{name}\n"]
    if before is None and after is not None:
        lines.append(f"new file mode {after.mode:06o}\n")
    elif after is None and before is not None:
        lines.append(f"deleted file mode {before.mode:06o}\n")
    elif before is not None and after is not None and before.mode != after.mode:
        lines += [f"old mode {before.mode:06o}\n", f"new mode {after.mode:06o}\n"]
    old, new = _text(before), _text(after)
    if old is None or new is None:
        return "".join([*lines, f"Binary files a/{name} and b/{name} differ\n"]).encode()
    names = (f"a/{name}" if before else "/dev/null", f"b/{name}" if after else "/dev/null")
    for line in difflib.unified_diff(old.splitlines(keepends=True), new.splitlines(keepends=True), names[0], names[1]):
        lines.append(line if line.endswith("\n") else f"{line}\n{_NO_NEWLINE}")
    return "".join(lines).encode("utf-8", "replace")


def _text(entry: Entry | None) -> str | None:
    """The text of a file; None for bytes that are none, and for what is too large."""
    if entry is None:
        return ""
    if entry.content is None or b"\0" in entry.content:
        return None
    try:
        return entry.content.decode()
    except UnicodeDecodeError:
        return None
