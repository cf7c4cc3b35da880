"""Errors with which a request or a command is refused, and their HTTP status.

Invariant: a refusal ends the request that it belongs to and changes nothing else. Any other exception on behalf of a
request is a defect of the engine: it also ends that request, with status 500. A field that cannot change the tokens is
ignored instead, and logged once for each name.
"""

from __future__ import annotations

import logging
import reprlib

log = logging.getLogger(__name__)

_shown = reprlib.Repr()
_shown.maxlevel, _shown.maxstring, _shown.maxother = 3, 80, 80


def shown(value: object) -> str:
    """Quote a client's value for a message; short, however long or deeply nested the value is."""
    return _shown.repr(value)


class IgnoredFields:
    """Logs each request field without effect once, for a limited number of names (clients may invent names)."""

    _MOST = 100

    def __init__(self) -> None:
        self._names: set[str] = set()

    def note(self, name: str) -> None:
        """Log that a field has no effect."""
        if name in self._names or len(self._names) >= self._MOST:
            return
        self._names.add(name)
        log.info("the field %s of a request has no effect here; this is logged once", shown(name))


def is_neutral(value: object) -> bool:
    """True if a field with this value, or with a list of such values for the prompts of a batch, has no effect."""
    each = value if isinstance(value, list) else [value]
    return all(one is None or one is False or one in ("", [], {}) for one in each)


class BadRequest(ValueError):
    """The request cannot be served as written; `param` names the invalid field."""

    status = 400

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class TooManySamples(BadRequest):
    """The engine's request limit is reached; the client may send the same request again later."""

    status = 429


class Conflict(BadRequest):
    """A well-formed update that does not fit the current weights."""

    status = 409


class BucketNotReceived(BadRequest):
    """The sender disconnected or its deadline expired; the request itself is valid."""

    status = 503


class RequestFailed(BadRequest):
    """The engine could not compute this request; it continues with the others."""

    status = 500


class StaleWeights(RequestFailed):
    """The weights match no published version; the engine generates again after an update with whole weights."""

    status = 503


class PartialWrite(RequestFailed):
    """Copying new weights failed in the middle: the loaded weights match no published version."""
