"""Why a request or a command is refused, and with which status: what a client reads when it did not get an answer.

Invariant: a refusal ends the request that it belongs to and changes nothing else. Anything else that is raised on
behalf of a request is a defect of the engine: it ends that request too, with status 500.
"""

from __future__ import annotations

import reprlib

_shown = reprlib.Repr()
_shown.maxlevel, _shown.maxstring, _shown.maxother = 3, 80, 80


def shown(value: object) -> str:
    """A client's value as a message may quote it: short, however long or deeply nested it is."""
    return _shown.repr(value)


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


class HalfWritten(RequestFailed):
    """New weights could not be copied to the end: what is loaded is not what anybody published."""
