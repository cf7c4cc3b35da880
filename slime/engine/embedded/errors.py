"""Why a request or a command is refused, and with which status: what a client reads when it did not get an answer.

Invariant: a refusal ends the request that it belongs to and changes nothing else. Anything else that is raised on
behalf of a request is a defect of the engine: it ends that request too, with status 500. What a request asks for and
cannot change its tokens is left out instead, and the log says so once for each name.
"""

from __future__ import annotations

import logging
import reprlib

log = logging.getLogger(__name__)

_shown = reprlib.Repr()
_shown.maxlevel, _shown.maxstring, _shown.maxother = 3, 80, 80


def shown(value: object) -> str:
    """A client's value as a message may quote it: short, however long or deeply nested it is."""
    return _shown.repr(value)


class LeftOut:
    """Names of request fields that had no effect, each noted once; a client that makes up names is not followed."""

    _MOST = 100

    def __init__(self) -> None:
        self._names: set[str] = set()

    def note(self, name: str) -> None:
        """Say that a field has no effect."""
        if name in self._names or len(self._names) >= self._MOST:
            return
        self._names.add(name)
        log.info("note: the field %s of a request has no effect here; it is not mentioned again", shown(name))


def is_neutral(value: object) -> bool:
    """Whether a field with this value, or with one of them for each prompt of a batch, asks for nothing."""
    each = value if isinstance(value, list) else [value]
    return all(one is None or one is False or one in ("", [], {}) for one in each)


class BadRequest(ValueError):
    """The request cannot be served as written; `param` names the field that is wrong."""

    status = 400

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class TooMany(BadRequest):
    """As many requests are here as the engine may hold: the same one may be sent again later."""

    status = 429


class Conflict(BadRequest):
    """A well-formed update that does not fit the weights that are here now."""

    status = 409


class NotArrived(BadRequest):
    """The sender is gone, or its deadline ran out: nothing is wrong with the request itself."""

    status = 503


class RequestFailed(BadRequest):
    """The engine could not compute this request; it goes on with the others."""

    status = 500


class StaleWeights(RequestFailed):
    """The weights are not what anybody published: the engine answers again once whole ones have come."""

    status = 503


class HalfWritten(RequestFailed):
    """New weights could not be copied to the end: what is loaded is not what anybody published."""
