"""Bounds what clients of an HTTP server can make its process log."""

from __future__ import annotations

import logging

from aiohttp.http_exceptions import HttpProcessingError


class ClientNoise(logging.Filter):
    """A filter for handlers or loggers.

    One message passes `MOST` times in `PERIOD_S`; the first one after that says how many were left out. A request that
    is not HTTP is its client's mistake: one line, no traceback.
    """

    MOST, PERIOD_S = 20, 10.0

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], HttpProcessingError):
            record.msg, record.args = "a client sent what is not HTTP: %s", (record.exc_info[1].message.split("\n")[0],)
            record.exc_info, record.levelno, record.levelname = None, logging.INFO, "INFO"
        kind = record.name, record.levelno, str(record.msg)
        if len(self._seen) > 1000:
            self._seen.clear()
        begun, count = self._seen.get(kind, (record.created, 0))
        if record.created - begun >= self.PERIOD_S:
            if count > self.MOST:
                record.msg = f"{record.getMessage()} ({count - self.MOST} more of this kind were not logged)"
                record.args = None
            begun, count = record.created, 0
        self._seen[kind] = begun, count + 1
        return count < self.MOST
