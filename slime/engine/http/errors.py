"""What can go wrong between us and an engine, as types.

Every error names the engine's URL and the call. ``transient`` says whether sending the same request again may help;
nothing else in the code decides that.
"""

from slime.errors import RunFailed


class EngineError(RunFailed):
    """Base of all errors of an engine call; ``url`` is the engine's base URL and ``call`` the path asked for."""

    transient: bool = False

    def __init__(self, url: str, call: str, reason: str) -> None:
        super().__init__(f"engine {url}: {call} {reason}")
        self.url = url
        self.call = call
        self.reason = reason


class EngineUnreachable(EngineError):
    """No connection, or the connection broke before the whole answer had come.

    ``accepted`` is False when the request certainly never reached the engine (the connection was refused).
    """

    transient = True

    def __init__(self, url: str, call: str, reason: str, *, accepted: bool) -> None:
        super().__init__(url, call, reason)
        self.accepted = accepted


class EngineTimeout(EngineError):
    """The deadline of the call ran out; with the flag that sets it and what the process does, if they are known."""

    def __init__(
        self, url: str, call: str, deadline_s: float, *, flag: str | None = None, state: str | None = None
    ) -> None:
        whose = "" if flag is None else f" ({flag})"
        does = "" if state is None else f": {state}"
        super().__init__(url, call, f"did not finish within its deadline of {deadline_s:g} s{whose}{does}")
        self.deadline_s = deadline_s


class EngineRejected(EngineError):
    """The engine understood the request and refused it (4xx, or ``success: false``): our mistake, not its."""

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
    """The engine answered something that is not the dialect; the answer is quoted."""
