"""How an agent program ended, as it is kept with the sample, and the ways in which it can fail.

Invariant: a program that could not do its work is a `HarnessFailed` with a cause, in one sentence, and never a result
that looks like a bad attempt; what it had printed is kept either way, cut to `KEPT_BYTES`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

KEPT_BYTES = 16384
"""Of each of stdout and stderr: the end."""
DIFF_BYTES = 131072
"""Of the diff: the beginning, in whole lines."""
NOT_EXECUTABLE, NOT_FOUND = 126, 127

Outcome = Literal["finished", "failed", "timeout"]


class HarnessFailed(Exception):
    """The agent program did not get to work, or ended in a way that says nothing about the model."""


class CliMissing(HarnessFailed):
    """The agent program is not there."""


class CliCrashed(HarnessFailed):
    """The agent program died, or gave up before it had asked for one turn."""


class CliTimedOut(HarnessFailed):
    """The agent program used up its time without asking for one turn."""


@dataclass(frozen=True)
class HarnessResult:
    """One run of an agent program. `reason` is what it said about its end; `stdout` and `stderr` are their last part.

    `finished`: it ended by itself and calls that a success. `failed`: it says, or its exit code says, that something
    went wrong, the end of the session included. `timeout`: its time was up.
    """

    harness: str
    version: str
    exit_code: int
    outcome: Outcome
    reason: str = ""
    wall_s: float = 0.0
    stdout: str = ""
    stderr: str = ""
    diff: str = ""
    diff_truncated: bool = False
    """The diff does not hold every change: `git apply` may refuse it, and so may a verifier that counts on it."""

    def to_metadata(self) -> dict[str, Any]:
        """Plain values, for `sample.metadata["harness"]`."""
        return asdict(self)

    def check(self, turns: int) -> None:
        """Raise `HarnessFailed` unless this run says something about the model: a crash does not, nor does silence.

        With `turns` in the session, a program that gave up or ran out of time has made an attempt, which can be judged.
        """
        what = f"{self.harness} {self.version}".strip()
        if self.exit_code in (NOT_EXECUTABLE, NOT_FOUND):
            raise CliMissing(f"{what} could not be started in the sandbox: {self._last_words()}")
        if self.outcome == "timeout":
            if not turns:
                raise CliTimedOut(f"{what} asked for no turn within {self.wall_s:.0f} s: {self._last_words()}")
        elif self.exit_code > 128 or (self.exit_code < 0 and self.outcome != "finished"):
            raise CliCrashed(f"{what} was ended by signal {self._signal()}: {self._last_words()}")
        elif not turns:
            raise CliCrashed(
                f"{what} ended with exit code {self.exit_code} before its first turn: {self._last_words()}"
            )

    def _signal(self) -> int:
        return self.exit_code - 128 if self.exit_code > 128 else -self.exit_code

    def _last_words(self) -> str:
        words = self.reason or self.stderr.strip() or self.stdout.strip() or "it said nothing"
        return " ".join(words[-300:].split())
