"""Judges of two answers, and how patiently they are asked.

Invariant: a match has a score or none. What a judge raises, or answers beside the point, is asked about again and then
is a match without a score; only a `UserError` and cancellation pass.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from slime.config.plugins import is_async
from slime.data.sample import Sample
from slime.engine.http.client import EngineRejected
from slime.errors import UserError
from slime.rollout.failures import FailureLog, contained
from slime.rollout.loop import DaemonThreads
from slime.rollout.rewards.errors import RewardError


class JudgeFailed(RewardError):
    """A judge gave no verdict, for a reason that says nothing about the answers."""


class Judge(Protocol):
    """Compares two answers to one prompt; may be a plain function, which is called in a thread."""

    def __call__(self, args: Any, first: Sample, second: Sample) -> float | Awaitable[float]:
        """1 if the first is better, 0 if the second is, 1/2 for neither; raises where it cannot say."""


@dataclass
class Calls:
    """How a judge was asked: calls (those again included) and those that failed."""

    made: int = 0
    failed: int = 0


@dataclass
class Match:
    """One judge and how it is asked.

    With `swap` a match is two calls, with the answers in both orders, and the score is their mean: a judge that prefers
    a place whatever stands there says 1 and then 0, which is a tie.
    """

    judge: Judge
    swap: bool = True
    tries: int = 3
    first_pause_s: float = 0.5
    concurrency: int = 32
    failures: FailureLog = field(default_factory=FailureLog)

    def __post_init__(self) -> None:
        if self.tries < 1 or self.concurrency < 1:
            raise UserError(
                f"a judge must be asked at least once, by at least one at a time: tries is {self.tries}, "
                f"concurrency {self.concurrency}"
            )
        self._seats = asyncio.Semaphore(self.concurrency)
        self._threads = DaemonThreads("judge", self.concurrency)
        weakref.finalize(self, self._threads.close)

    async def score(self, args: Any, first: Sample, second: Sample, calls: Calls) -> float | None:
        """The first one's share of the point, or None where the judge gave no verdict in one of the orders."""
        orders = [self._asked(args, first, second, calls)]
        if self.swap:
            orders.append(self._asked(args, second, first, calls))
        said = await asyncio.gather(*orders)
        if None in said:
            return None
        shares = [share if place == 0 else 1 - share for place, share in enumerate(said) if share is not None]
        return sum(shares) / len(shares)

    async def _asked(self, args: Any, first: Sample, second: Sample, calls: Calls) -> float | None:
        for attempt in range(self.tries):
            if attempt:
                await asyncio.sleep(self.first_pause_s * 2 ** (attempt - 1))
            calls.made += 1
            try:
                async with self._seats:
                    return _share(await self._verdict(args, first, second))
            except UserError:
                raise
            except EngineRejected as error:  # the same request would be refused again
                calls.failed += 1
                self.failures.record("judge", error)
                return None
            except Exception as error:  # noqa: BLE001 - whatever a judge raises is the outcome of this match
                calls.failed += 1
                self.failures.record("judge", error)
        return None

    async def _verdict(self, args: Any, first: Sample, second: Sample) -> Any:
        """What the judge returns: an async one is awaited here, a plain one runs in a thread."""
        call = partial(self.judge, args, first, second)
        return await contained(call if is_async(self.judge) else partial(self._result_of, call), "the judge")

    async def _result_of(self, call: Callable[[], Any]) -> Any:
        result = await (await self._threads.begin(call, "the judge"))
        return await result if inspect.isawaitable(result) else result


def _share(verdict: Any) -> float:
    """A verdict as a number of [0, 1]."""
    if isinstance(verdict, str | bytes) or not hasattr(verdict, "__float__"):
        raise JudgeFailed(f"a judge must say 1, 0 or 1/2, not {verdict!r:.80}")
    share = float(verdict)
    if not (math.isfinite(share) and 0 <= share <= 1):
        raise JudgeFailed(f"a judge must say 1, 0 or 1/2, not {share}")
    return share
