"""Health checks and restarts of the engines of a fleet.

Invariant: an engine that is not known to be healthy gets no requests (it is down in the pool); a new or restarted
engine gets none before it has the current weights. An engine that needs more than `max_restarts` restarts ends the run.
An engine that cannot be placed again is retired, and the run continues as long as another engine is left or may join.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
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
    """An engine failed after all its restarts, or no engine is left."""


class Restartable(Protocol):
    """Interface of a fleet for its supervisor; an engine is identified by its index in `urls`."""

    @property
    def urls(self) -> list[str]: ...

    def why_ended(self, index: int) -> str | None:
        """Describe how the engine's process ended; None while it runs."""

    def restart(self, index: int) -> None:
        """Stop the rest of the engine, start it again, and return once it is healthy; `urls` has its new address.
        If it cannot be restarted, remove it from `urls` and raise `EngineRetired`."""


PoolLoopRunner = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine in the event loop of the pool and returns its result."""


@dataclass(frozen=True)
class HealthCheckSettings:
    """Health-check settings: interval, timeout of one check, delay before the first check, restarts per engine."""

    interval_s: float
    timeout_s: float
    first_wait_s: float
    max_restarts: int


class Supervisor:
    """Checks and restarts engines in a thread while a `watching` block runs.

    `refresh(url)` brings a new engine to the current weights and returns whether that was possible now; if not, the
    engine waits (`waiting`) until `weights_arrived` is called after the next update. A fleet of a frozen model has no
    `refresh`. `route(url, up)` updates an external router. `key` is the API key of the fleet's new engines. With
    `may_be_empty` engines may join later, so that the run continues without any. A fleet with `restarts_any` restarts
    each of its engines up to `max_restarts` times; another fleet retires unhealthy engines.
    """

    def __init__(
        self,
        fleet: Restartable,
        pool: EnginePool,
        run_async: PoolLoopRunner,
        watch: HealthCheckSettings,
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
        self._lock = threading.RLock()  # held during a round: no engine changes while another thread holds it
        self._stop = threading.Event()
        self._active = threading.Event()
        self._watched = 0  # `watching` blocks that run now, in all threads
        self._counting = threading.Lock()
        self._failure: EnginesGivenUp | None = None
        self.waiting: set[str] = set()
        self._restarting: str | None = None
        self._thread = background("engine-supervisor", self._run)

    @property
    def restarts(self) -> int:
        """Number of restarts so far."""
        return self._restarts.total()

    @property
    def changes(self) -> int:
        """Number of restarts and retired engines so far."""
        return self.restarts + self._retired

    def away(self) -> dict[str, str]:
        """Engines that get no requests now, with the reason."""
        restarting = self._restarting
        found = dict.fromkeys(self.waiting.copy(), "waiting for weights")
        return found if restarting is None else {**found, restarting: "restarting"}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Check and restart engines while the body runs; raise afterwards if an engine was given up."""
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
        """Prevent the supervisor from stopping or starting engines while the body runs.

        The current round ends by itself before, since each of its waits has a deadline.
        """
        with waiting(self._thread.name, "to end its round", timeout_s=None):
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    def check(self) -> None:
        """Raise if an engine was given up, or if the supervisor's thread has died."""
        if self._failure is not None:
            raise self._failure
        self._thread.check()

    def heal(self) -> None:
        """Check every engine now, and restart unhealthy ones."""
        with self.undisturbed():
            self._round(probe=True)
        self.check()

    def welcome(self, url: str, key: str | None = None) -> None:
        """Add a new, healthy engine of the fleet; it gets requests once it has the current weights."""
        with self.undisturbed():
            self._add(url, key)
            self._admit(url)

    def retire(self, url: str, reason: str) -> None:
        """Remove an engine of the fleet permanently."""
        with self.undisturbed():
            self._set(url, up=False)
            self._forget(url, reason)
        self.check()

    def weights_arrived(self) -> None:
        """Admit the waiting engines: every engine now has the current weights."""
        with self.undisturbed():
            for url in sorted(self.waiting):
                self._mark_ready(url)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()
        self._active.set()
        if not self._thread.join(self._watch.timeout_s + 5.0):
            logger.warning("engine supervisor: its thread did not end in time and was abandoned")
        self._thread.close()

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
            except Exception as error:  # it would be lost with the thread; `check` raises it in the driver
                logger.exception("engine supervisor: a round failed")
                self._give_up(f"engine supervisor: a round failed: {type(error).__name__}: {error}", error)

    def _round(self, *, probe: bool) -> None:
        """Restart engines that have ended or, with `probe`, do not answer; then admit the waiting ones."""
        urls = self._fleet.urls
        sick = {url: reason for i, url in enumerate(urls) if (reason := self._fleet.why_ended(i)) is not None}
        if probe:
            alive = [client for client in self._pool.roster if client.base_url in urls and client.base_url not in sick]
            problems = self._run_async(named(self._probe(alive), "health checks of the engines"))
            sick |= {
                client.base_url: reason for client, reason in zip(alive, problems, strict=True) if reason is not None
            }
        for url, reason in sick.items():
            self._restart_or_retire(url, reason)
        for url in sorted(self.waiting):
            self._admit(url)

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
            return None if client.sampled_at > began else reason  # tokens received since then: busy, not unhealthy

        return list(await asyncio.gather(*(ask(client) for client in clients)))

    def _restart_or_retire(self, url: str, reason: str) -> None:
        index = self._fleet.urls.index(url)
        self._set(url, up=False)
        while not self._restarts_any or self._restarts[url] < self._watch.max_restarts:
            self._restarts[url] += 1
            if self._restarts_any:
                logger.warning("engine %s is restarted: %s", url, reason.splitlines()[0])
            self._restarting = url
            try:
                self._fleet.restart(index)
            except EngineDied as death:  # it died during the start, which counts as another failure
                reason = str(death)
                continue
            except EngineRetired as retired:
                self._forget(url, str(retired))
                return
            finally:
                self._restarting = None
            new_url = self._fleet.urls[index]
            if new_url == url:
                self.waiting.add(url)
                return
            self._restarts[new_url] += self._restarts.pop(url, 0)
            self._run_async(named(self._pool.remove(url), f"engine pool, removing {url}"))
            self._add(new_url, self._key)
            return
        self._give_up(
            f"engine {url} failed after {self._restarts[url]} restarts (--engine-max-restarts): {reason}", None
        )

    def _add(self, url: str, key: str | None) -> None:
        self._in_pool(lambda: self._pool.add(url, api_key=key), f"adding {url}")
        self.waiting.add(url)

    def _forget(self, url: str, reason: str) -> None:
        self.waiting.discard(url)
        self._retired += 1 + self._restarts.pop(url, 0)  # a later engine at this address starts with zero restarts
        self._run_async(named(self._pool.remove(url), f"engine pool, removing {url}"))
        logger.warning("engine %s is retired: %s", url, reason.splitlines()[0])
        if not len(self._pool) and not self._may_be_empty:
            self._give_up(f"the last engine is gone: {reason}", None)

    def _admit(self, url: str) -> None:
        try:
            is_current = self._refresh is None or self._refresh(url)
        except EngineError as error:  # an engine that cannot load the weights is unhealthy
            self._restart_or_retire(url, str(error))
            return
        if is_current:
            self._mark_ready(url)

    def _mark_ready(self, url: str) -> None:
        self._set(url, up=True)
        self.waiting.discard(url)
        logger.warning("engine %s %s", url, "is back" if self._restarts[url] else "was added")

    def _set(self, url: str, *, up: bool) -> None:
        self._in_pool(lambda: (self._pool.set_up if up else self._pool.set_down)(url), f"marking {url}")
        if self._route is not None:
            self._route(url, up)

    def _give_up(self, message: str, cause: BaseException | None) -> None:
        self._failure = EnginesGivenUp(message)
        self._failure.__cause__ = cause
        self._in_pool(lambda: self._pool.give_up(message), "giving up")

    def _in_pool(self, change: Callable[[], object], what: str) -> None:
        """Change the pool in its event loop."""

        async def run() -> None:
            change()

        self._run_async(named(run(), f"engine pool, {what}"))
