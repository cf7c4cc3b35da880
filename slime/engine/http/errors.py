"""Error types of engine calls.

Every error names the engine's URL and the call. ``transient`` says whether a retry of the same request may succeed;
nothing else in the code decides that.
"""

from slime.errors import RunFailed


class EngineError(RunFailed):
    """Base of all errors of an engine call; ``url`` is the engine's base URL and ``call`` the requested path."""

    transient: bool = False

    def __init__(self, url: str, call: str, reason: str) -> None:
        super().__init__(f"engine {url}: {call} {reason}")
        self.url = url
        self.call = call
        self.reason = reason


class EngineUnreachable(EngineError):
    """The connection failed, or broke before the response was complete.

    ``accepted`` is False if the request certainly never reached the engine (the connection was refused).
    """

    transient = True

    def __init__(self, url: str, call: str, reason: str, *, accepted: bool) -> None:
        super().__init__(url, call, reason)
        self.accepted = accepted


class EngineTimeout(EngineError):
    """The call exceeded its deadline; names the flag that sets it and the state of the process, if they are known."""

    def __init__(
        self, url: str, call: str, deadline_s: float, *, flag: str | None = None, state: str | None = None
    ) -> None:
        source = "" if flag is None else f" ({flag})"
        activity = "" if state is None else f": {state}"
        super().__init__(url, call, f"did not finish within its deadline of {deadline_s:g} s{source}{activity}")
        self.deadline_s = deadline_s


class EngineRejected(EngineError):
    """The engine refused the request (4xx, or ``success: false``): an error of the client, not of the engine."""

    def __init__(self, url: str, call: str, status: int, message: str) -> None:
        super().__init__(url, call, f"was refused with status {status}: {message}")
        self.status = status
        self.message = message


class EngineFailed(EngineError):
    """The engine failed while serving the request (5xx)."""

    transient = True

    def __init__(self, url: str, call: str, status: int, message: str) -> None:
        super().__init__(url, call, f"failed with status {status}: {message}")
        self.status = status
        self.message = message


class EngineProtocolError(EngineError):
    """The engine's response does not follow the dialect; the response is quoted."""
