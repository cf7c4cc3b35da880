"""Runs an aiohttp application in its own thread, under upstream slime's names.

Invariant: the application accepts requests when `run_app_in_thread` returns; after `AppHandle.stop` its thread is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from slime.rollout.event_loop import LoopThread

START_TIMEOUT_S = 60.0


class FilteredAccessLogger(AbstractAccessLogger):
    """Logs only failed requests (status 400 and above)."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        if response.status >= 400:
            self.logger.warning("%s %s: %d after %.1f s", request.method, request.path, response.status, time)


class AppHandle:
    """A running application; `port` is its actual port, also if 0 was requested."""

    def __init__(self, loop: LoopThread, runner: web.AppRunner, host: str, port: int) -> None:
        self._loop, self.runner = loop, runner
        self.host, self.port = host, port
        self._is_stopped = False

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def loop(self) -> Any:
        """The event loop of the application's thread."""
        return self._loop.loop

    def stop(self, timeout: float = START_TIMEOUT_S) -> None:
        """End the application and its thread; a second call does nothing."""
        if self._is_stopped:
            return
        self._is_stopped = True
        try:
            self._loop.run(self.runner.cleanup(), timeout, whom="the application in its thread")
        finally:
            self._loop.close()

    close = stop

    def __enter__(self) -> AppHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def run_app_in_thread(
    app: web.Application,
    host: str = "127.0.0.1",
    port: int = 0,
    runner_kwargs: Mapping[str, Any] | None = None,
    *,
    name: str = "slime-app",
    timeout: float = START_TIMEOUT_S,
) -> AppHandle:
    """Serve `app` from its own thread; `runner_kwargs` are arguments of `aiohttp.web.AppRunner`."""
    options = {"handler_cancellation": True, "access_log_class": FilteredAccessLogger, "shutdown_timeout": 1.0}
    loop = LoopThread(name)
    try:
        runner = web.AppRunner(app, **{**options, **(runner_kwargs or {})})
        loop.run(runner.setup(), timeout, whom="the application in its thread")
        loop.run(web.TCPSite(runner, host, port).start(), timeout, whom=f"{host}:{port}")
    except BaseException:
        loop.close()
        raise
    return AppHandle(loop, runner, host, runner.addresses[0][1])
