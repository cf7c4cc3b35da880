"""Messages over one socket of a pair: a length, a JSON object, and the file descriptors sent with it."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence

TYPE_CHECKING = False  # importing `typing` would take a fifth of a start
if TYPE_CHECKING:
    from typing import Any

    JsonObject = dict[str, Any]
    JsonMapping = Mapping[str, Any]

_LENGTH = struct.Struct("!I")
LONGEST = 16 << 20
MOST_DESCRIPTORS = 8


class Broken(Exception):
    """The other side sent something that is not a message."""


def packed(message: JsonMapping) -> tuple[bytes, bytes]:
    """Encode a message: the length, which is sent first and with the descriptors, and the body."""
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)), body


def send(sock: socket.socket, message: JsonMapping, descriptors: Sequence[int] = ()) -> None:
    """Send a message on a blocking socket."""
    length, body = packed(message)
    socket.send_fds(sock, [length], list(descriptors))
    sock.sendall(body)


def receive(sock: socket.socket) -> tuple[JsonObject, list[int]] | None:
    """Receive the next message on a blocking socket; None at the end of the stream."""
    length, descriptors, _, _ = socket.recv_fds(sock, _LENGTH.size, MOST_DESCRIPTORS)
    for descriptor in descriptors:  # otherwise every command would inherit the socket of its own response
        os.set_inheritable(descriptor, False)
    if not length:
        return None
    length += exactly(sock, _LENGTH.size - len(length))
    return unpacked(exactly(sock, length_of(length))), descriptors


def length_of(header: bytes) -> int:
    """Number of bytes in the body that follows a header."""
    (size,) = _LENGTH.unpack(header)
    if size > LONGEST:
        raise Broken(f"message of {size} bytes, more than the limit of {LONGEST}")
    return int(size)


def unpacked(body: bytes) -> JsonObject:
    """Decode the body of a message."""
    try:
        message = json.loads(body)
    except ValueError as error:
        raise Broken(f"message is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise Broken("message is not a JSON object")
    return message


def exactly(sock: socket.socket, count: int) -> bytes:
    """Receive exactly `count` bytes."""
    parts = bytearray()
    while len(parts) < count:
        part = sock.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise Broken("stream ended in the middle of a message")
        parts += part
    return bytes(parts)
