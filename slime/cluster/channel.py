"""Messages between two processes over a stream socket: msgpack frames, numpy arrays included, never pickles.

The invariants: a message arrives whole or not at all; a receive that runs out of time loses nothing and can be
repeated; a message that cannot be packed is refused before its first byte is sent, so that the channel stays usable.

A frame is `<u64 bytes that follow> <u64 body bytes> <u32 n> <u64 size> x n  body  buffer x n`. Small arrays travel
inside the msgpack body; large ones follow as raw buffers, sent from and received into their own memory uncopied.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Generator, Sequence
from typing import Any, Self

import msgpack
import numpy as np

DEFAULT_MAX_BYTES = 64 * 2**30
DEFAULT_SEND_TIMEOUT_S = 600.0
_OUT_OF_BAND_BYTES = 64 * 1024
_EXT_INLINE_ARRAY = 1
_EXT_BUFFER_ARRAY = 2
_LENGTH = struct.Struct("<Q")
_HEAD = struct.Struct("<QI")


class ChannelClosed(Exception):
    """The other side is gone, or this side was closed."""


class ChannelTimeout(Exception):
    """The deadline passed before the message was whole."""


class ChannelProtocolError(Exception):
    """What arrived is not a frame of this protocol, or is larger than allowed."""


class Channel:
    """Both directions of one connection. Several threads may use it: sends are serialised, and so are receives."""

    def __init__(self, sock: socket.socket, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        sock.setblocking(False)
        sock.set_inheritable(False)
        self._sock = sock
        self._max_bytes = max_bytes
        self._send_lock = threading.Lock()
        self._recv_lock = threading.Lock()
        self._reading: Generator[None, None, Any] | None = None

    @classmethod
    def from_fd(cls, fd: int, *, max_bytes: int = DEFAULT_MAX_BYTES) -> Self:
        """Take over an inherited socket descriptor (the child's side of `channel_pair`)."""
        return cls(socket.socket(fileno=fd), max_bytes=max_bytes)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, obj: Any, timeout_s: float = DEFAULT_SEND_TIMEOUT_S) -> None:
        """Send one message. A deadline that passes half-way closes the channel, since the rest can't be told apart."""
        pieces = _pack(obj, self._max_bytes)
        deadline = time.monotonic() + timeout_s
        with self._send_lock:
            self._send_pieces(pieces, deadline, timeout_s)

    def offer(self, obj: Any) -> bool:
        """Send a small message if the way is free now; whether it was sent. For news that are worth nothing later, so
        it neither waits nor fails for want of a receiver."""
        pieces = _pack(obj, self._max_bytes)
        if not self._send_lock.acquire(blocking=False):
            return False
        try:
            now = time.monotonic()
            if not self._wait(select.POLLOUT, now):  # set while most of the buffer is free
                return False
            self._send_pieces(pieces, now + DEFAULT_SEND_TIMEOUT_S, DEFAULT_SEND_TIMEOUT_S)
        except ChannelClosed:
            return False
        finally:
            self._send_lock.release()
        return True

    def recv(self, timeout_s: float | None) -> Any:
        """The next message. `None` waits without a deadline: for a child whose life ends with its parent anyway."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._recv_lock:
            if self._reading is None:
                self._reading = self._read_frame()
            while True:
                try:
                    next(self._reading)
                except StopIteration as whole:
                    self._reading = None
                    return whole.value
                except Exception:
                    self._reading = None
                    raise
                if not self._wait(select.POLLIN, deadline):
                    raise ChannelTimeout(f"no message within {timeout_s:g} s")

    def close(self) -> None:
        """Close this side; the other side then reads ChannelClosed. Safe to call again."""
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _wait(self, event: int, deadline: float | None) -> bool:
        if self._sock.fileno() < 0:
            raise ChannelClosed("the channel was closed on this side")
        poller = select.poll()
        poller.register(self._sock, event)
        if deadline is None:
            return bool(poller.poll())
        return bool(poller.poll(max(0.0, deadline - time.monotonic()) * 1000))

    def _send_pieces(self, pieces: Sequence[memoryview], deadline: float, timeout_s: float) -> None:
        for piece in pieces:
            self._send_piece(piece, deadline, timeout_s)

    def _send_piece(self, piece: memoryview, deadline: float, timeout_s: float) -> None:
        while len(piece):
            try:
                piece = piece[self._sock.send(piece) :]
            except BlockingIOError:
                if not self._wait(select.POLLOUT, deadline):
                    self.close()
                    raise ChannelTimeout(f"the receiver did not take the message within {timeout_s:g} s") from None
            except OSError as error:
                raise ChannelClosed(f"the other side is gone ({error.strerror})") from error

    def _read_frame(self) -> Generator[None, None, Any]:
        """Read one frame, yielding whenever more bytes must come first."""
        (length,) = _LENGTH.unpack((yield from self._read(_LENGTH.size)))
        if not _HEAD.size <= length <= self._max_bytes:
            raise ChannelProtocolError(f"a message of {length} bytes was announced (at most {self._max_bytes})")
        body_length, count = _HEAD.unpack((yield from self._read(_HEAD.size)))
        table_length = count * _LENGTH.size
        if _HEAD.size + table_length + body_length > length:
            raise ChannelProtocolError("a message announced more parts than it is long")
        table = yield from self._read(table_length)
        sizes = [size for (size,) in _LENGTH.iter_unpack(table)]
        if _HEAD.size + table_length + body_length + sum(sizes) != length:
            raise ChannelProtocolError("a message's parts do not add up to its length")
        body = yield from self._read(body_length)
        buffers: list[np.ndarray] = []
        for size in sizes:
            buffer = np.empty(size, dtype=np.uint8)
            yield from self._read_into(buffer.data)
            buffers.append(buffer)
        return _unpack(body, buffers)

    def _read(self, size: int) -> Generator[None, None, bytearray]:
        data = bytearray(size)
        yield from self._read_into(memoryview(data))
        return data

    def _read_into(self, view: memoryview) -> Generator[None, None, None]:
        while len(view):
            try:
                count = self._sock.recv_into(view)
            except BlockingIOError:
                yield
                continue
            except OSError as error:
                raise ChannelClosed(f"the other side is gone ({error.strerror})") from error
            if count == 0:
                raise ChannelClosed("the other side is gone")
            view = view[count:]


def readable(channels: Sequence[Channel], timeout_s: float) -> list[int]:
    """The places of the channels that have something to read, or whose other side is gone; waits for the first."""
    poller = select.poll()  # `select.select` fails with a descriptor above 1,023
    places = {channel.fileno(): place for place, channel in enumerate(channels)}
    for fileno in places:
        poller.register(fileno, select.POLLIN)
    return sorted(places[fileno] for fileno, _ in poller.poll(timeout_s * 1000))


def channel_pair(*, max_bytes: int = DEFAULT_MAX_BYTES) -> tuple[Channel, socket.socket]:
    """This process's Channel and the socket for a child: pass its fileno in `pass_fds`, then close it here."""
    ours, theirs = socket.socketpair()
    return Channel(ours, max_bytes=max_bytes), theirs


def _pack(obj: Any, max_bytes: int) -> list[memoryview]:
    buffers: list[memoryview] = []

    def encode(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return _encode_array(value, buffers)
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} can't travel over a channel")

    body = msgpack.packb(obj, default=encode, use_bin_type=True, unicode_errors="surrogatepass")
    table = b"".join(_LENGTH.pack(len(buffer)) for buffer in buffers)
    length = _HEAD.size + len(table) + len(body) + sum(len(buffer) for buffer in buffers)
    if length > max_bytes:
        raise ValueError(f"a message of {length} bytes is larger than the channel allows ({max_bytes})")
    head = _LENGTH.pack(length) + _HEAD.pack(len(body), len(buffers)) + table
    first = [memoryview(head), memoryview(body)] if len(body) > _OUT_OF_BAND_BYTES else [memoryview(head + body)]
    return first + buffers


def _encode_array(array: np.ndarray, buffers: list[memoryview]) -> msgpack.ExtType:
    if array.dtype.hasobject or array.dtype.names is not None or array.dtype.subdtype is not None:
        raise TypeError(f"an array of dtype {array.dtype} can't travel over a channel: only plain numbers and strings")
    if array.nbytes == 0:
        return _array_ext(_EXT_INLINE_ARRAY, array, b"")
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if array.nbytes <= _OUT_OF_BAND_BYTES:
        return _array_ext(_EXT_INLINE_ARRAY, array, flat.tobytes())
    buffers.append(flat.data)
    return _array_ext(_EXT_BUFFER_ARRAY, array, len(buffers) - 1)


def _array_ext(code: int, array: np.ndarray, content: bytes | int) -> msgpack.ExtType:
    return msgpack.ExtType(code, msgpack.packb([array.dtype.str, list(array.shape), content]))


def _unpack(body: bytearray, buffers: list[np.ndarray]) -> Any:
    def decode(code: int, data: bytes) -> Any:
        if code not in (_EXT_INLINE_ARRAY, _EXT_BUFFER_ARRAY):
            raise ChannelProtocolError(f"a message holds an unknown extension type {code}")
        dtype, shape, content = msgpack.unpackb(data)
        flat = buffers[content] if code == _EXT_BUFFER_ARRAY else np.frombuffer(bytearray(content), dtype=np.uint8)
        if flat.size == 0:
            return np.empty(shape, dtype=dtype)
        return flat.view(dtype).reshape(shape)

    return msgpack.unpackb(
        body, ext_hook=decode, strict_map_key=False, unicode_errors="surrogatepass", max_ext_len=len(body)
    )
