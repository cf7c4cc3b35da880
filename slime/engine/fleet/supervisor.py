"""Watches over the engines of a fleet and brings back those that die or hang.

Invariant: an engine that is not known to be well gets no requests (it is down in the pool), and one that is new or was
started again gets none before it has the current weights. An engine that needs more than `max_restarts` starts ends the
run; one that has no place any more is done without, as long as another is left or may come.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from slime.cluster.watchdog import Limit, background, named, waiting
from slime.engine.fleet.processes import EngineDied, EngineRetired
from slime.engine.http.client import EngineClient
from slime.engine.http.errors import EngineError
from slime.engine.http.pool import EnginePool
from slime.errors import RunFailed

logger = logging.getLogger(__name__)


class EnginesGivenUp(RunFailed):
    """An engine kept failing."""


class Restartable(Protocol):
    """A fleet as its supervisor sees it; engines go by their place in `urls`."""

    @property
    def urls(self) -> list[str]: ...

    def why_ended(self, index: int) -> str | None:
        """How the engine's process ended; None while it runs."""

    def restart(self, index: int) -> None:
        """End what is left of the engine, start it again, and return once it is healthy; `urls` says where it answers
        now. Raises `EngineRetired` after it was taken off `urls` instead."""


class RunAsync(Protocol):
    def __call__(self, coro: Any, /) -> Any: ...


@dataclass(frozen=True)
class Watch:
    """How often to look, how long to wait for an answer, how long to leave engines alone at first."""

    interval_s: float
    timeout_s: float
    first_wait_s: float
    max_restarts: int


class Supervisor:
    """One thread that looks after the engines while it is `watching`.

    `refresh(url)` brings a fresh engine to the current weights and says whether it could do so now; if not, the engine
    waits (`waiting`) until `weights_arrived` is called after the next update. A fleet of frozen models needs none.
    `route(url, up)` tells a router of another process who is there. `key` is what new engines of the fleet ask for.
    With `may_be_empty` engines may come from elsewhere, so that the end of the last one is not the end of the run.
    A fleet that `restarts_any` engine of its own has `max_restarts` for each; others retire those that are not well.
    """

    def __init__(
        self,
        fleet: Restartable,
        pool: EnginePool,
        run_async: RunAsync,
        watch: Watch,
        *,
        refresh: Callable[[str], bool] | None,
        route: Callable[[str, bool], None] | None = None,
        key: str | None = None,
        may_be_empty: bool = False,
        restarts_any: bool = True,
    ) -> None:
        self._fleet = fleet
        self._pool = pool
        self._run_async = run_async
        self._watch = watch
        self._refresh = refresh
        self._route = route
        self._key = key
        self._may_be_empty = may_be_empty
        self._restarts_any = restarts_any
        self._restarts: Counter[str] = Counter()
        self._retired = 0
        self._lock = threading.RLock()  # held through one round: whoever holds it sees no engine change
        self._stop = threading.Event()
        self._active = threading.Event()
        self._watched = 0  # bodies of `watching` that run now, in whatever threads
        self._counting = threading.Lock()
        self._failure: EnginesGivenUp | None = None
        self.waiting: set[str] = set()
        self._restarting: str | None = None
        self._thread = background("engine-supervisor", self._run)

    @property
    def restarts(self) -> int:
        """Engines started again so far."""
        return self._restarts.total()

    @property
    def changes(self) -> int:
        """How often an engine was started again or given up for good so far."""
        return self.restarts + self._retired

    def away(self) -> dict[str, str]:
        """Engines that get no requests now, and why."""
        restarting = self._restarting
        found = dict.fromkeys(self.waiting.copy(), "waiting for weights")
        return found if restarting is None else {**found, restarting: "restarting"}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look after the engines while the body runs; raise afterwards if they were given up meanwhile."""
        with self._counting:
            self._watched += 1
            self._active.set()
        try:
            yield
        finally:
            with self._counting:
                self._watched -= 1
                if not self._watched:
                    self._active.clear()
        self.check()

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """No engine is stopped or started by the supervisor while the body runs."""
        with self._between_rounds():
            yield

    def check(self) -> None:
        """Raise if an engine was given up, or if nobody looks after the engines any more."""
        if self._failure is not None:
            raise self._failure
        self._thread.check()

    def heal(self) -> None:
        """Look at every engine now, and restart those that are not well."""
        with self._between_rounds():
            self._round(probe=True)
        self.check()

    def welcome(self, url: str, key: str | None = None) -> None:
        """A new engine of the fleet, which is well: it gets requests once it has the current weights."""
        with self._between_rounds():
            self._add(url, key)
            self._admit(url)

    def retire(self, url: str, reason: str) -> None:
        """An engine of the fleet is gone for good."""
        with self._between_rounds():
            self._set(url, up=False)
            self._forget(url, reason)
        self.check()

    def weights_arrived(self) -> None:
        """Every engine has the current weights: those that waited for them may work."""
        with self._between_rounds():
            for url in sorted(self.waiting):
                self._let_in(url)

    def close(self) -> None:
        """End the thread. Safe to call again."""
        self._stop.set()
        self._active.set()
        if not self._thread.join(self._watch.timeout_s + 5.0):
            logger.warning("the engine supervisor is still at work and was left behind")
        self._thread.close()

    @contextmanager
    def _between_rounds(self) -> Iterator[None]:
        """Hold the lock; a round ends by itself, since each of its waits has a deadline."""
        with waiting(self._thread.name, "to end its round", timeout_s=None):
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    # the thread

    def _run(self) -> None:
        self._stop.wait(self._watch.first_wait_s)
        while not self._stop.wait(self._watch.interval_s):
            self._active.wait()
            if self._stop.is_set() or self._failure is not None:
                return
            try:
                with self._lock:
                    if self._active.is_set():
                        self._round(probe=True)
            except Exception as error:  # the thread's end would go unseen: `check` raises it in the driver
                logger.exception("looking after the engines failed")
                self._give_up(f"looking after the engines failed: {type(error).__name__}: {error}", error)

    def _round(self, *, probe: bool) -> None:
        sick = self._sick(probe)
        for url, reason in sick.items():
            self._bring_back(url, reason)
        for url in sorted(self.waiting):
            self._admit(url)

    def _sick(self, probe: bool) -> dict[str, str]:
        """Engines that ended or do not answer, and how one knows."""
        urls = self._fleet.urls
        sick = {url: reason for i, url in enumerate(urls) if (reason := self._fleet.why_ended(i)) is not None}
        if probe:
            there = [client for client in self._pool.roster if client.base_url in urls and client.base_url not in sick]
            answers = self._run_async(named(self._probe(there), "health checks of the engines"))
            sick |= {
                client.base_url: reason for client, reason in zip(there, answers, strict=True) if reason is not None
            }
        return sick

    async def _probe(self, clients: Sequence[EngineClient]) -> list[str | None]:
        async def ask(client: EngineClient) -> str | None:
            began = time.monotonic()
            try:
                limit_s = Limit(self._watch.timeout_s, "--rollout-health-check-timeout")
                well = await client.health_generate(timeout_s=limit_s)
            except EngineError as error:
                reason = str(error)
            else:
                reason = "its health check failed"
                if well:
                    return None
            return None if client.sampled_at > began else reason  # an engine that samples for us is busy, not sick

        return list(await asyncio.gather(*(ask(client) for client in clients)))

    def _bring_back(self, url: str, reason: str) -> None:
        index = self._fleet.urls.index(url)
        self._set(url, up=False)
        while not self._restarts_any or self._restarts[url] < self._watch.max_restarts:
            self._restarts[url] += 1
            if self._restarts_any:
                logger.warning("engine %s is restarted: %s", url, reason.splitlines()[0])
            self._restarting = url
            try:
                self._fleet.restart(index)
            except EngineDied as death:  # before it answered: that is one more failure of this engine
                reason = str(death)
                continue
            except EngineRetired as retired:
                self._forget(url, str(retired))
                return
            finally:
                self._restarting = None
            self._moved(url, self._fleet.urls[index])
            return
        self._give_up(
            f"engine {url} failed after {self._restarts[url]} restarts (--engine-max-restarts): {reason}", None
        )

    def _moved(self, before: str, now: str) -> None:
        """An engine was started again, perhaps at another address."""
        if before == now:
            self.waiting.add(before)
            return
        self._restarts[now] += self._restarts.pop(before, 0)
        self._run_async(named(self._pool.remove(before), f"engine pool, removing {before}"))
        self._add(now, self._key)

    def _add(self, url: str, key: str | None) -> None:
        async def add() -> None:
            self._pool.add(url, api_key=key)

        self._run_async(named(add(), f"engine pool, adding {url}"))
        self.waiting.add(url)

    def _forget(self, url: str, reason: str) -> None:
        self.waiting.discard(url)
        self._retired += 1 + self._restarts.pop(url, 0)  # another one there begins anew
        self._run_async(named(self._pool.remove(url), f"engine pool, removing {url}"))
        logger.warning("engine %s is done without: %s", url, reason.splitlines()[0])
        if not len(self._pool) and not self._may_be_empty:
            self._give_up(f"the last engine is gone: {reason}", None)

    def _admit(self, url: str) -> None:
        try:
            is_current = self._refresh is None or self._refresh(url)
        except EngineError as error:  # one that cannot take the weights is not well
            self._bring_back(url, str(error))
            return
        if is_current:
            self._let_in(url)

    def _let_in(self, url: str) -> None:
        self._set(url, up=True)
        self.waiting.discard(url)
        logger.warning("engine %s is %s", url, "back" if self._restarts[url] else "there")

    def _set(self, url: str, *, up: bool) -> None:
        async def mark() -> None:
            (self._pool.set_up if up else self._pool.set_down)(url)

        self._run_async(named(mark(), f"engine pool, marking {url}"))
        if self._route is not None:
            self._route(url, up)

    def _give_up(self, message: str, cause: BaseException | None) -> None:
        self._failure = EnginesGivenUp(message)
        self._failure.__cause__ = cause

        async def mark() -> None:
            self._pool.give_up(message)

        self._run_async(named(mark(), "engine pool, giving up"))
