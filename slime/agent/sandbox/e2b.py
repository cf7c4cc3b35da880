"""Sandboxes of E2B, or of a server that speaks its protocol. The package `e2b` is imported here and nowhere else.

Upstream's class and environment variables. A call that the network lost is made again, up to six times; a command is
only if it is idempotent, because the lost call may have been the answer.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from shlex import join
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from slime.agent.sandbox.protocol import (
    EXIT_TIME_BUDGET_EXCEEDED,
    TIMEOUT,
    CommandFailed,
    Outcome,
    SandboxError,
    SandboxLimits,
)
from slime.errors import UserError

LONGEST_PAUSE_S = 32.0
_FINAL = frozenset(
    {
        "AuthenticationException", "CommandExitException", "FileNotFoundException", "InvalidArgumentException",
        "NotEnoughSpaceException", "NotFoundException", "TemplateException", "TimeoutException",
    }
)  # fmt: skip
"""Exceptions of the package that say something about what was asked; all others may be the network's."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1", "0.0.0.0")

Value = TypeVar("Value")


def setting(name: str, default: str) -> str:
    """An environment variable of upstream: `SLIME_AGENT_` and its older name `SWE_`."""
    return os.environ.get(f"SLIME_AGENT_{name}") or os.environ.get(f"SWE_{name}") or default


def pause_s(attempt: int) -> float:
    """How long to wait before the call is made again: anything up to a limit that doubles, so that many do not meet."""
    return random.uniform(0.0, min(LONGEST_PAUSE_S, 2.0**attempt))


class E2BSandbox:
    """One sandbox on a server of E2B. `image` goes into its metadata, where self-hosted servers look for it."""

    kind = "e2b"
    boundary = True

    def __init__(
        self,
        image: str | None = None,
        *,
        template: str | None = None,
        limits: SandboxLimits | None = None,
        env: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
        workdir: str = "/home/user",
    ) -> None:
        self.limits = limits or SandboxLimits()
        self.workdir = workdir
        self.image = image
        self.template = template
        self.env = dict(env or {})
        self.metadata = dict(metadata or {})
        self.retries = int(setting("SANDBOX_RPC_RETRIES", "6"))
        self.pause: Callable[[int], float] = pause_s
        self._package = _import_e2b()
        self._sandbox: Any = None

    @property
    def sandbox_id(self) -> str:
        return "" if self._sandbox is None else str(self._sandbox.sandbox_id)

    async def __aenter__(self) -> Self:
        metadata = dict(self.metadata)
        if self.image is not None:
            metadata[setting("SANDBOX_IMAGE_METADATA_KEY", "image")] = self.image
        if size := setting("E2B_SANDBOX_SIZE", ""):
            metadata["size"] = size
        options: dict[str, Any] = {
            "timeout": int(setting("SANDBOX_LIFETIME_SEC", "3600")), "metadata": metadata, "envs": self.env
        }  # fmt: skip
        if self.template is not None:
            options["template"] = self.template
        self._sandbox = await self._call("create a sandbox", lambda: self._package.AsyncSandbox.create(**options))
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._sandbox is not None:
            await self._call("end the sandbox", self._sandbox.kill)

    async def exec(
        self,
        cmd: str | Sequence[str],
        *,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 (upstream's name)
        check: bool = False,
        idempotent: bool = True,
    ) -> Outcome:
        """Run a line in the sandbox's shell, or a program with its arguments."""
        seconds = self.limits.seconds if timeout is None else timeout
        line = cmd if isinstance(cmd, str) else join(cmd)
        outcome = await self._outcome(line, user, {**self.env, **(env or {})}, seconds, idempotent)
        if check and outcome.code != 0:
            shown = line if len(line) <= 200 else line[:200] + "..."
            raise CommandFailed(
                f"exit code {outcome.code} of {shown!r}: {outcome.cause or outcome.err[-500:]}", outcome
            )
        return outcome

    async def _outcome(self, line: str, user: str, env: dict[str, str], seconds: float, idempotent: bool) -> Outcome:
        def run() -> Awaitable[Any]:
            return self._running.commands.run(line, user=user, envs=env, timeout=seconds)

        try:
            result = await self._call("run a command", run, retry=idempotent)
        except self._package.CommandExitException as ended:
            return Outcome(ended.exit_code, ended.stdout, ended.stderr)
        except self._package.TimeoutException:
            return Outcome(EXIT_TIME_BUDGET_EXCEEDED, "", "", TIMEOUT)
        return Outcome(result.exit_code, result.stdout, result.stderr)

    async def write_file(self, path: str, content: str | bytes | Path, *, user: str = "root") -> None:
        """Make a file, and the folders above it; a `Path` is a file on this side."""
        data = await asyncio.to_thread(content.read_bytes) if isinstance(content, Path) else content
        await self._call(f"write {path}", lambda: self._running.files.write(path, data, user=user))

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """The text of a file."""
        try:
            return str(await self._call(f"read {path}", lambda: self._running.files.read(path, user=user)))
        except self._package.NotFoundException as error:
            raise FileNotFoundError(2, f"cannot read {path} in sandbox {self.sandbox_id}: {error}") from None

    async def reach(self, endpoint: str) -> str:
        """The same URL: it must be one that E2B's machines reach."""
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or parts.hostname in _LOOPBACK:
            raise SandboxError(
                f"a sandbox of E2B is on another machine and does not reach {endpoint}: give --host, "
                "--agent-server-port and --agent-public-url"
            )
        return endpoint.rstrip("/")

    @property
    def _running(self) -> Any:
        if self._sandbox is None:
            raise SandboxError("this sandbox of E2B is not started: use `async with`")
        return self._sandbox

    async def _call(self, what: str, call: Callable[[], Awaitable[Value]], *, retry: bool = True) -> Value:
        attempt = 0
        while True:
            try:
                return await call()
            except Exception as error:  # the package's, its HTTP client's or the socket's: sorted here
                if type(error).__name__ in _FINAL or isinstance(error, SandboxError):
                    raise
                if not retry or attempt >= self.retries:
                    tries = f" after {attempt + 1} tries" if attempt else ""
                    raise SandboxError(f"E2B could not {what}{tries}: {type(error).__name__}: {error}") from error
            await asyncio.sleep(self.pause(attempt))
            attempt += 1


def _import_e2b() -> Any:
    try:
        return importlib.import_module("e2b")
    except ImportError:
        raise UserError("--sandbox e2b needs the package e2b, which is not installed: pip install e2b") from None
