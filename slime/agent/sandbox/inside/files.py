"""Reads and writes files from inside the sandbox, so that symbolic links resolve inside it.

Only regular files are opened, never a pipe or a device on which the reader would block.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat

from . import fd_messages

TYPE_CHECKING = False  # importing `typing` would take a fifth of a start
if TYPE_CHECKING:
    from .fd_messages import JsonMapping

_CHUNK = 1 << 20


def read(spec: JsonMapping, result: socket.socket) -> None:
    """Respond with the size of a file and then its bytes."""
    descriptor = os.open(_resolve_path(spec), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    size = _check_regular_file(descriptor, spec["path"]).st_size
    if size > spec["most"]:
        raise OSError(27, f"{spec['path']} has {size} bytes, more than the {spec['most']} that one file may have")
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(spec["most"] + 1)
    fd_messages.send(result, {"size": len(data)})
    result.sendall(data)


def write(spec: JsonMapping, result: socket.socket, source: int) -> None:
    """Write a file, creating its parent folders, with the bytes read from the descriptor `source`."""
    path = _resolve_path(spec)
    os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    descriptor = os.open(path, flags, spec["mode"])
    _check_regular_file(descriptor, spec["path"])
    written = 0
    with os.fdopen(source, "rb", buffering=0) as data, os.fdopen(descriptor, "wb", buffering=0) as file:
        file.truncate(0)
        while chunk := data.read(_CHUNK):
            written += len(chunk)
            if written > spec["most"]:
                raise OSError(
                    27, f"{spec['path']} would have more than the {spec['most']} bytes that one file may have"
                )
            rest = memoryview(chunk)
            while rest:
                rest = rest[file.write(rest) :]
    fd_messages.send(result, {"size": written})


def _resolve_path(spec: JsonMapping) -> str:
    """Resolve the absolute path; a sandbox without a root folder of its own may only use paths below `within`."""
    path = os.path.join(spec["cwd"], os.path.expanduser(spec["path"]))
    if spec["within"] is not None:
        real = os.path.realpath(path)
        if os.path.commonpath([real, spec["within"]]) != spec["within"]:
            raise PermissionError(13, f"{spec['path']} is outside of the sandbox's folder {spec['within']}")
    return path


def _check_regular_file(descriptor: int, path: str) -> os.stat_result:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(22, f"{path} is not a regular file")
    return status


def remove_tree(path: str) -> None:
    """Remove a folder tree of any depth and any modes; entries that cannot be removed stay.

    Nested folders are moved up and emptied one after the other, so neither a stack nor a path grows with the depth.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(OSError):
        if not os.path.islink(path):
            os.chmod(path, 0o700)
        top = os.open(path, flags)
        try:
            stuck: set[str] = set()
            while names := [name for name in os.listdir(top) if name not in stuck]:
                for name in names:
                    try:
                        if _remove_unless_folder(name, top):
                            continue
                        folder = os.open(name, flags, dir_fd=top)
                        try:
                            for inner in os.listdir(folder):
                                if not _remove_unless_folder(inner, folder):
                                    os.rename(inner, f".{os.urandom(12).hex()}", src_dir_fd=folder, dst_dir_fd=top)
                        finally:
                            os.close(folder)
                        os.rmdir(name, dir_fd=top)
                    except OSError:
                        stuck.add(name)
        finally:
            os.close(top)
        os.rmdir(path)


def _remove_unless_folder(name: str, folder: int) -> bool:
    """Remove an entry that is not a folder; make a folder writable, so that it can be emptied and moved."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=folder)
        return True
    os.chmod(name, 0o700, dir_fd=folder)
    return False
