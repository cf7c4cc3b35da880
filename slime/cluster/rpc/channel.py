"""Sends messages between two processes over a stream socket: msgpack frames with numpy arrays, never pickles.

Invariants: a message arrives completely or not at all. A receive that times out loses nothing and can be repeated. A
message that cannot be packed is rejected before its first byte is sent, so the channel stays usable.

A frame is `<u64 bytes that follow> <u64 body bytes> <u32 n> <u64 size> x n  body  buffer x n`. Small arrays are inside
the msgpack body; large ones follow as raw buffers (`slime.cluster.rpc.messages`), sent from and received into their own
memory without a copy.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Self

import numpy as np

from slime.cluster.rpc.messages import DamagedMessage, Piece, batch_pieces, pack, remaining_pieces, unpack

DEFAULT_MAX_BYTES = 64 * 2**30
DEFAULT_SEND_TIMEOUT_S = 600.0
_LENGTH = struct.Struct("<Q")
_HEAD = struct.Struct("<QI")


class ChannelClosed(Exception):
    """Raised when the other side is gone or this side was closed."""


class ChannelTimeout(Exception):
    """Raised when the deadline passes before the message is complete."""


class ChannelProtocolError(Exception):
    """Raised when received bytes are not a frame of this protocol, or the frame is larger than allowed."""


class Channel:
    """Both directions of one connection. Thread-safe: sends are serialised, and so are receives."""

    def __init__(self, sock: socket.socket, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        sock.setblocking(False)
        sock.set_inheritable(False)
        self._sock = sock
        self._max_bytes = max_bytes
        self._send_lock = threading.Lock()
        self._recv_lock = threading.Lock()
        self._reading: Generator[None, None, object] | None = None

    @classmethod
    def from_fd(cls, fd: int) -> Self:
        """Take over an inherited socket descriptor (the child's side of `channel_pair`)."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, obj: object, timeout_s: float = DEFAULT_SEND_TIMEOUT_S) -> None:
        """Send one message. A timeout closes the channel, since the receiver may have part of the message."""
        frame = _encode_frame(obj, self._max_bytes)
        deadline = time.monotonic() + timeout_s
        with self._send_lock:
            self._send_frame(frame, deadline, timeout_s)

    def offer(self, obj: object) -> bool:
        """Send a small message if the socket is writable now; return True if it was sent.

        For status messages that are useless later: it neither waits nor fails without a receiver.
        """
        frame = _encode_frame(obj, self._max_bytes)
        if not self._send_lock.acquire(blocking=False):
            return False
        try:
            now = time.monotonic()
            if not self._wait(select.POLLOUT, now):  # set while most of the buffer is free
                return False
            self._send_frame(frame, now + DEFAULT_SEND_TIMEOUT_S, DEFAULT_SEND_TIMEOUT_S)
        except ChannelClosed:
            return False
        finally:
            self._send_lock.release()
        return True

    def recv(self, timeout_s: float | None) -> Any:
        """Return the next message. `None` waits without a deadline: for a child that dies with its parent anyway."""
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
        """Close this side; the other side then raises ChannelClosed. Idempotent."""
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

    def _send_frame(self, frame: Iterable[list[Piece]], deadline: float, timeout_s: float) -> None:
        for pieces in frame:
            rest = pieces
            while rest:
                try:
                    rest = remaining_pieces(rest, self._sock.sendmsg(rest))
                except BlockingIOError:
                    if not self._wait(select.POLLOUT, deadline):
                        self.close()
                        raise ChannelTimeout(f"the receiver did not read the message within {timeout_s:g} s") from None
                except OSError as error:
                    raise ChannelClosed(f"the other side is gone ({error.strerror})") from error

    def _read_frame(self) -> Generator[None, None, object]:
        """Read one frame, yielding whenever it needs more bytes."""
        (length,) = _LENGTH.unpack((yield from self._read(_LENGTH.size)))
        if not _HEAD.size <= length <= self._max_bytes:
            raise ChannelProtocolError(f"a message of {length} bytes was announced (at most {self._max_bytes})")
        body_length, count = _HEAD.unpack((yield from self._read(_HEAD.size)))
        table_length = count * _LENGTH.size
        if _HEAD.size + table_length + body_length > length:
            raise ChannelProtocolError("a message announced parts that are longer than the message")
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
        try:
            return unpack(body, buffers)
        except DamagedMessage as error:
            raise ChannelProtocolError(str(error)) from error

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


class ChannelPoller:
    """Waits until one of several channels is readable; `without` removes a channel."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._poller = select.poll()  # `select.select` fails with a descriptor above 1,023
        self._places = {channel.fileno(): place for place, channel in enumerate(channels)}
        self._filenos = list(self._places)
        for fileno in self._filenos:
            self._poller.register(fileno, select.POLLIN)

    def ready(self, timeout_s: float) -> list[int]:
        """Return the indices of the channels that are readable, or whose other side is gone."""
        return sorted(self._places[fileno] for fileno, _ in self._poller.poll(timeout_s * 1000))

    def without(self, place: int) -> None:
        """Stop listening to the channel at this index."""
        self._poller.unregister(self._filenos[place])


def channel_pair(*, max_bytes: int = DEFAULT_MAX_BYTES) -> tuple[Channel, socket.socket]:
    """Return this process's Channel and the socket for a child: pass its fileno in `pass_fds`, then close it here."""
    ours, theirs = socket.socketpair()
    return Channel(ours, max_bytes=max_bytes), theirs


def _encode_frame(obj: object, max_bytes: int) -> Iterator[list[Piece]]:
    """Pack a message into lists of consecutive pieces; raises at once if it cannot be packed."""
    body, buffers = pack(obj)
    sizes = [buffer.size for buffer in buffers]
    length = _HEAD.size + len(sizes) * _LENGTH.size + len(body) + sum(sizes)
    if length > max_bytes:
        raise ValueError(f"a message of {length} bytes is larger than the channel allows ({max_bytes})")
    head = _LENGTH.pack(length) + _HEAD.pack(len(body), len(sizes)) + b"".join(map(_LENGTH.pack, sizes))
    return batch_pieces(chain([head, body], *(buffer.pieces() for buffer in buffers)))
