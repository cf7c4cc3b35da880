"""Forwards connections to a listening socket inside the sandbox to an address outside."""

from __future__ import annotations

import contextlib
import selectors
import socket

_CHUNK = 1 << 16
_MAX_BUFFERED_BYTES = 1 << 20


class RelayEnd:
    """One end of a forwarded connection, with the bytes still to be written to it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.other: RelayEnd | None = None
        self.waiting = bytearray()
        self.ended = False
        """The other side has finished sending: shut down for writing once nothing is waiting."""
        self.read_all = False


class Relay:
    """Forwards all connections of one sandbox."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.selector = selector

    def serve(self, listener: socket.socket, target: str) -> None:
        """Forward every connection to `target`: `host:port`, or the path of a unix socket."""
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ, lambda events: self._accept(listener, target))

    def _accept(self, listener: socket.socket, target: str) -> None:
        try:
            near, _ = listener.accept()
        except OSError:
            return
        try:
            far = _connect_target(target)
        except OSError:
            near.close()
            return
        one, other = RelayEnd(near), RelayEnd(far)
        one.other, other.other = other, one
        for side in (one, other):
            side.sock.setblocking(False)
            self._watch(side)

    def _watch(self, side: RelayEnd) -> None:
        assert side.other is not None
        events = 0
        if not side.read_all and len(side.other.waiting) < _MAX_BUFFERED_BYTES:
            events |= selectors.EVENT_READ
        if side.waiting:
            events |= selectors.EVENT_WRITE
        with contextlib.suppress(KeyError):
            self.selector.unregister(side.sock)
        if events:
            self.selector.register(side.sock, events, lambda ready: self._move(side, ready))

    def _move(self, side: RelayEnd, ready: int) -> None:
        other = side.other
        assert other is not None
        try:
            if ready & selectors.EVENT_READ:
                data = side.sock.recv(_CHUNK)
                side.read_all = not data
                other.waiting += data
                other.ended = side.read_all
                self._flush(other)
            if ready & selectors.EVENT_WRITE:
                self._flush(side)
        except BlockingIOError:
            pass
        except OSError:
            self._close(side)
            return
        if side.read_all and other.read_all and not side.waiting and not other.waiting:
            self._close(side)
            return
        self._watch(side)
        self._watch(other)

    def _flush(self, side: RelayEnd) -> None:
        if side.waiting:
            with contextlib.suppress(BlockingIOError):
                del side.waiting[: side.sock.send(side.waiting)]
        if side.ended and not side.waiting:
            with contextlib.suppress(OSError):
                side.sock.shutdown(socket.SHUT_WR)

    def _close(self, side: RelayEnd) -> None:
        for end in (side, side.other):
            assert end is not None
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(end.sock)
            end.sock.close()


def _connect_target(target: str) -> socket.socket:
    """Connect to a server on this machine, where connecting does not wait."""
    if target.startswith("/"):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(5)
        try:
            sock.connect(target)
        except OSError:
            sock.close()
            raise
        return sock
    host, _, port = target.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=5)
