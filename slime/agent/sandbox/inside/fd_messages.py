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
MAX_MESSAGE_BYTES = 16 << 20
MAX_DESCRIPTORS = 8


class InvalidMessage(Exception):
    """The other side sent something that is not a message."""


def encode_message(message: JsonMapping) -> tuple[bytes, bytes]:
    """Encode a message: the length, which is sent first and with the descriptors, and the body."""
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)), body


def send(sock: socket.socket, message: JsonMapping, descriptors: Sequence[int] = ()) -> None:
    """Send a message on a blocking socket."""
    length, body = encode_message(message)
    socket.send_fds(sock, [length], list(descriptors))
    sock.sendall(body)


def receive(sock: socket.socket) -> tuple[JsonObject, list[int]] | None:
    """Receive the next message on a blocking socket; None at the end of the stream."""
    length, descriptors, _, _ = socket.recv_fds(sock, _LENGTH.size, MAX_DESCRIPTORS)
    for descriptor in descriptors:  # otherwise every command would inherit the socket of its own response
        os.set_inheritable(descriptor, False)
    if not length:
        return None
    length += receive_exactly(sock, _LENGTH.size - len(length))
    return decode_message(receive_exactly(sock, decode_length(length))), descriptors


def decode_length(header: bytes) -> int:
    """Number of bytes in the body that follows a header."""
    (size,) = _LENGTH.unpack(header)
    if size > MAX_MESSAGE_BYTES:
        raise InvalidMessage(f"message of {size} bytes, more than the limit of {MAX_MESSAGE_BYTES}")
    return int(size)


def decode_message(body: bytes) -> JsonObject:
    """Decode the body of a message."""
    try:
        message = json.loads(body)
    except ValueError as error:
        raise InvalidMessage(f"message is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise InvalidMessage("message is not a JSON object")
    return message


def receive_exactly(sock: socket.socket, count: int) -> bytes:
    """Receive exactly `count` bytes."""
    parts = bytearray()
    while len(parts) < count:
        part = sock.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise InvalidMessage("stream ended in the middle of a message")
        parts += part
    return bytes(parts)
