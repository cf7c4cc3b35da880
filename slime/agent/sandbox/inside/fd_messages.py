"""Messages over a socket of a pair: a length, a JSON object, and the descriptors that travel with it."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence

TYPE_CHECKING = False  # importing `typing` would take a fifth of a start
if TYPE_CHECKING:
    from typing import Any

_LENGTH = struct.Struct("!I")
LONGEST = 16 << 20
MOST_DESCRIPTORS = 8


class Broken(Exception):
    """The other side sent something that is no message."""


def packed(message: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """The length that goes first, with the descriptors, and what follows it."""
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)), body


def send(sock: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send on a blocking socket."""
    length, body = packed(message)
    socket.send_fds(sock, [length], list(descriptors))
    sock.sendall(body)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message on a blocking socket; None at the end."""
    length, descriptors, _, _ = socket.recv_fds(sock, _LENGTH.size, MOST_DESCRIPTORS)
    for descriptor in descriptors:  # or every command would hold its own answer's socket
        os.set_inheritable(descriptor, False)
    if not length:
        return None
    length += exactly(sock, _LENGTH.size - len(length))
    return unpacked(exactly(sock, length_of(length))), descriptors


def length_of(header: bytes) -> int:
    """How many bytes follow."""
    (size,) = _LENGTH.unpack(header)
    if size > LONGEST:
        raise Broken(f"a message of {size} bytes")
    return int(size)


def unpacked(body: bytes) -> dict[str, Any]:
    """The object in the body of a message."""
    try:
        message = json.loads(body)
    except ValueError as error:
        raise Broken(f"no JSON: {error}") from error
    if not isinstance(message, dict):
        raise Broken("no object")
    return message


def exactly(sock: socket.socket, count: int) -> bytes:
    """That many bytes."""
    parts = bytearray()
    while len(parts) < count:
        part = sock.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise Broken("ended in the middle of a message")
        parts += part
    return bytes(parts)
