"""File server for joined engines: serves folders of the driver's machine, and fetches them on the engine's machine.

Invariant: only files of published folders are served, and only to clients with the ticket of a session. A fetched
folder has the listed names, sizes and checksums, or it does not exist.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import xxhash
from aiohttp import web

from slime.cluster.http_checks import carries_key
from slime.engine.http.blocking import authorization
from slime.errors import RunFailed

FILES_ROUTE = "/files/{shelf}/{name:.+}"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class ListedFile:
    """A file in a listing: its name relative to the folder, its size, and its checksum if one was computed."""

    name: str
    size: int
    checksum: str | None = None

    @classmethod
    def from_json(cls, value: Sequence[object]) -> ListedFile:
        """Parse an entry of a message; the name must stay inside the folder."""
        name, size, checksum = value
        path = Path(str(name))
        if path.is_absolute() or ".." in path.parts or not isinstance(size, int) or size < 0:
            raise ValueError(f"not a valid file of a folder: {value!r}")
        return cls(str(path), size, None if checksum is None else str(checksum))

    def to_json(self) -> list[object]:
        return [self.name, self.size, self.checksum]


def list_folder_files(folder: Path, *, checksums: bool) -> list[ListedFile]:
    """List every file of a folder, except hidden ones."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    inside = [(path, path.relative_to(folder)) for path in files]
    return [
        ListedFile(str(name), path.stat().st_size, _checksum(path) if checksums else None)
        for path, name in inside
        if not any(part.startswith(".") for part in name.parts)
    ]


def digest(files: Sequence[ListedFile]) -> str:
    """Hash of a listing, which names a folder with exactly these files."""
    return xxhash.xxh3_128(repr([one.to_json() for one in files]).encode()).hexdigest()


class FileShares:
    """Folders that can be fetched now, and the tickets of the clients."""

    def __init__(self) -> None:
        self._folders: dict[str, Path] = {}
        self._tickets: set[str] = set()

    def put(self, shelf: str, folder: Path) -> None:
        self._folders[shelf] = folder

    def clear(self, shelf: str) -> None:
        self._folders.pop(shelf, None)

    def admit(self, ticket: str) -> None:
        """Allow requests with this ticket."""
        self._tickets.add(ticket)

    def dismiss(self, ticket: str) -> None:
        self._tickets.discard(ticket)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Serve one file."""
        if not any(carries_key(request.headers, ticket) for ticket in self._tickets):
            raise web.HTTPUnauthorized
        folder, name = self._folders.get(request.match_info["shelf"]), Path(request.match_info["name"])
        if folder is None or name.is_absolute() or any(part.startswith(".") for part in name.parts):
            raise web.HTTPNotFound
        path = folder / name
        if not path.is_file():
            raise web.HTTPNotFound
        return web.FileResponse(path, chunk_size=_CHUNK)


class FetchFailed(RunFailed):
    """A folder could not be fetched completely."""


async def fetch(url: str, ticket: str, shelf: str, files: Sequence[ListedFile], folder: Path) -> None:
    """Fetch the listed files into `folder`, which is created by a rename after the last file."""
    unfinished = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    try:
        unfinished.mkdir(parents=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=120)
        async with aiohttp.ClientSession(headers=authorization(ticket), timeout=timeout) as session:
            for one in files:
                target, size, summed = unfinished / one.name, 0, xxhash.xxh3_128()
                target.parent.mkdir(parents=True, exist_ok=True)
                async with session.get(f"{url}/files/{shelf}/{one.name}") as response:
                    response.raise_for_status()
                    with target.open("wb") as out:
                        async for chunk in response.content.iter_chunked(_CHUNK):
                            out.write(chunk)
                            size += len(chunk)
                            if one.checksum is not None:
                                summed.update(chunk)
                if size != one.size:
                    raise FetchFailed(f"{one.name}: received {size} bytes instead of {one.size}")
                if one.checksum not in (None, summed.hexdigest()):
                    raise FetchFailed(f"{one.name}: the checksum of the received file is wrong")
        _put_in_place(unfinished, folder)
    except (OSError, aiohttp.ClientError, TimeoutError) as error:
        raise FetchFailed(f"{folder.name} could not be fetched: {error or type(error).__name__}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _put_in_place(unfinished: Path, folder: Path) -> None:
    if not folder.is_dir():  # another process may have fetched it at the same time
        unfinished.rename(folder)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
