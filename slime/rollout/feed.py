"""Where the loop gets its rollouts from: the one thing in which the modes differ.

Invariant of every feed: rollouts come in the order of their numbers, each once; what fails while one is made is raised
by the next `get`; after `close` no new rollout is begun.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, TypeVar

from slime.config.asynchronous import is_async
from slime.config.groups.asynchronous import ONE_STEP
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.continuous import ContinuousRollout
from slime.rollout.maker import Generated, RolloutMaker
from slime.rollout.runtime import RolloutRuntime
from slime.waits import acting_as, background, raise_failures, waiting

T = TypeVar("T")

LOOK_S = 0.5
"""How often somebody who waits for a rollout looks whether it can still come."""


class RunAsync(Protocol):
    """Runs a coroutine on the event loop of the rollout, and waits for its result."""

    def __call__(self, coro: Coroutine[Any, Any, T], /, *, whom: str | None = None) -> T: ...


class Feed(ABC):
    """Rollouts, one after the other."""

    @abstractmethod
    def get(self, rollout_id: int) -> Generated:
        """The rollout with this number; waits until it is there."""

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """What the engines' users must not meet (new weights, an evaluation) happens in the body."""
        yield

    def weights_arrived(self, version: int) -> None:  # noqa: B027 (only generation that never stops wants to know)
        """All engines have these weights now."""

    def close(self) -> None:  # noqa: B027 (nothing runs between two calls unless a feed says so)
        """End what is under way. Safe to call again."""


class OnDemand(Feed):
    """Synchronous: a rollout is made when it is asked for."""

    def __init__(self, maker: RolloutMaker) -> None:
        self._maker = maker

    def get(self, rollout_id: int) -> Generated:
        return self._maker.make(rollout_id)


class Ahead(Feed):
    """One step off: a thread makes the next rollouts while the caller trains; up to `ready` of them lie waiting.

    Weights change, and evaluations run, only between two rollouts, so every rollout has one weight version.
    """

    def __init__(self, maker: RolloutMaker, *, start: int, total: int, ready: int) -> None:
        self._maker = maker
        self._numbers = range(start, total)
        self._most_ready = ready
        self._ready: deque[tuple[int, Generated]] = deque()
        self._busy = self._held = self._closed = False
        self._changed = threading.Condition()
        self._making = background("rollouts ahead", self._make_all)

    def get(self, rollout_id: int) -> Generated:
        with self._changed:
            self._wait(f"rollout {rollout_id}", "to be made", lambda: bool(self._ready))
            number, made = self._ready.popleft()
            assert number == rollout_id, f"rollout {number} was made when {rollout_id} was asked for"
            self._changed.notify_all()
            return made

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        with self._changed:
            self._held = True
            self._wait("the rollout being made", "to end", lambda: not self._busy)
        try:
            yield
        finally:
            with self._changed:
                self._held = False
                self._changed.notify_all()

    def close(self) -> None:
        """No further rollout is begun; one that is being made ends with the engines it uses."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._making.close()

    def _wait(self, whom: str, why: str, is_so: Callable[[], bool]) -> None:
        """Until it is so, or whoever makes rollouts (or anything else in the background) has died."""
        with waiting(whom, why, timeout_s=None):
            while not is_so():
                raise_failures()
                self._changed.wait(LOOK_S)

    def _make_all(self) -> None:
        for number in self._numbers:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (not self._held and len(self._ready) < self._most_ready))
                if self._closed:
                    return
                self._busy = True
            try:
                with acting_as(f"rollout {number}"):
                    made = self._maker.make(number)
                with self._changed:
                    self._ready.append((number, made))
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()


class NeverStopping(Feed):
    """Fully asynchronous: finished groups are taken from a generation that goes on through training and updates."""

    def __init__(self, maker: RolloutMaker, continuous: ContinuousRollout, run_async: RunAsync) -> None:
        self._maker = maker
        self._continuous = continuous
        self._run_async = run_async
        self._watched = ExitStack()
        self._watched.enter_context(maker.at_work())  # also while the trainers work
        run_async(continuous.start())

    def get(self, rollout_id: int) -> Generated:
        return self._maker.make_with(rollout_id, lambda: self._taken(rollout_id))

    def _taken(self, rollout_id: int) -> RolloutFnTrainOutput:
        return self._run_async(self._continuous.take(rollout_id), whom=f"rollout {rollout_id}")

    def weights_arrived(self, version: int) -> None:
        self._run_async(self._continuous.weights_arrived(version))

    def close(self) -> None:
        self._run_async(self._continuous.aclose())
        self._watched.close()


def make_feed(
    maker: RolloutMaker, runtime: RolloutRuntime, data_source: Any, *, start: int, total: int, replayed: Sequence[int]
) -> Feed:
    """The feed that `--async-mode` asks for; `replayed` are rollouts that the journal has already."""
    args = runtime.args
    if not is_async(args):
        return OnDemand(maker)
    if args.async_mode == ONE_STEP:
        return Ahead(maker, start=start, total=total, ready=args.async_buffer_size)
    first = next((number for number in range(start, total) if number not in replayed), max(start, total))
    continuous = ContinuousRollout(runtime, data_source, first=first, total=total, version=start)
    return NeverStopping(maker, continuous, runtime.run)
