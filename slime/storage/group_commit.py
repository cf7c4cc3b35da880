"""Group commit: a thread writes many queued changes in one transaction.

Invariants: a write that was awaited is in the file, or raised. Writes happen in the order of their requests; code that
writes outside the queue calls `drain` first if the order matters. An error while a write is prepared fails that write
only; a transaction that fails fails all writes in it.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from slime.errors import RunFailed

Change = Callable[[sqlite3.Connection], Callable[[], None] | None]
"""Writes to a connection inside a transaction; returns a function to call after the commit, or None."""

MOST_AT_ONCE = 64
"""Largest number of writes in one transaction."""


class JournalFailed(RunFailed):
    """The journal can no longer be written; its contents are intact."""


class Transactions(Protocol):
    """A database that the queue writes to."""

    def transaction(self) -> AbstractContextManager[sqlite3.Connection]:
        """Open a transaction: everything written in it is committed, or nothing."""
        ...


@dataclass
class _Write:
    prepare: Callable[[], Change | None]
    loop: asyncio.AbstractEventLoop
    written: asyncio.Future[None]

    def end(self, error: BaseException | None = None) -> None:
        """Resolve the future of the write; do nothing if its event loop is closed."""

        def resolve() -> None:
            if self.written.done():
                return
            if error is None:
                self.written.set_result(None)
            else:
                self.written.set_exception(error)

        try:
            self.loop.call_soon_threadsafe(resolve)
        except RuntimeError:
            return  # the loop is closed


class CommitQueue:
    """The queue of writes to a journal, and its thread, which starts with the first write."""

    def __init__(self, database: Transactions) -> None:
        self._database = database
        self._queue: deque[_Write] = deque()
        self._writing = threading.RLock()
        self._work = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    async def write(self, prepare: Callable[[], Change | None]) -> None:
        """Queue a write and wait until it is in the file, without blocking the event loop."""
        loop = asyncio.get_running_loop()
        one = _Write(prepare, loop, loop.create_future())
        with self._work:
            if self._closed:
                raise RuntimeError("the journal is closed: nothing more can be recorded")
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="journal", daemon=True)
                self._thread.start()
            self._queue.append(one)
            self._work.notify()
        await one.written

    def drain(self) -> None:
        """Write everything that is queued."""
        with self._writing:
            while batch := self._taken():
                self._commit(batch)

    def close(self) -> None:
        """Write everything that is queued, and end the thread."""
        with self._work:
            self._closed = True
            self._work.notify()
        if self._thread is not None:
            self._thread.join()
        self.drain()

    def _serve(self) -> None:
        while True:
            with self._work:
                while not self._queue and not self._closed:
                    self._work.wait()
                if self._closed:
                    return
            with self._writing:
                if batch := self._taken():
                    self._commit(batch)

    def _taken(self) -> list[_Write]:
        with self._work:
            return [self._queue.popleft() for _ in range(min(MOST_AT_ONCE, len(self._queue)))]

    def _commit(self, batch: list[_Write]) -> None:
        ready: list[tuple[_Write, Change]] = []
        for one in batch:
            try:
                change = one.prepare()
            except Exception as error:  # noqa: BLE001 - it is raised where the write is awaited
                one.end(error)
                continue
            if change is None:
                one.end()
            else:
                ready.append((one, change))
        if not ready:
            return
        try:
            with self._database.transaction() as connection:
                done = [change(connection) for _, change in ready]
        except Exception as error:  # noqa: BLE001 - it is raised where the writes are awaited
            for one, _ in ready:
                one.end(error)
            return
        for (one, _), after in zip(ready, done, strict=True):
            try:
                if after is not None:
                    after()
            except Exception as error:  # noqa: BLE001 - it is raised where the write is awaited
                one.end(error)
            else:
                one.end()
