"""Sandboxes of E2B, or of a server that speaks its protocol. The package `e2b` is imported only here.

The class and the environment variables are upstream's. A call that fails because of the network is retried up to six
times. A command is retried only if it is idempotent, because the command may have run and only its response been lost.
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
from slime.storage.json_types import JsonObject

LONGEST_PAUSE_S = 32.0
_REQUEST_ERRORS = frozenset(
    {
        "AuthenticationException", "CommandExitException", "FileNotFoundException", "InvalidArgumentException",
        "NotEnoughSpaceException", "NotFoundException", "TemplateException", "TimeoutException",
    }
)  # fmt: skip
"""Exceptions of the package that are caused by the request; all others may be caused by the network."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1", "0.0.0.0")

Value = TypeVar("Value")


def read_setting(name: str, default: str) -> str:
    """Read an environment variable of upstream, under the prefix `SLIME_AGENT_` or the older `SWE_`."""
    return os.environ.get(f"SLIME_AGENT_{name}") or os.environ.get(f"SWE_{name}") or default


def retry_pause_s(attempt: int) -> float:
    """Seconds before the next retry: random up to a limit that doubles, so that many callers do not retry at once."""
    return random.uniform(0.0, min(LONGEST_PAUSE_S, 2.0**attempt))


class E2BSandbox:
    """One sandbox on an E2B server. `image` is put into its metadata, where self-hosted servers read it."""

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
        self.retries = int(read_setting("SANDBOX_RPC_RETRIES", "6"))
        self.pause: Callable[[int], float] = retry_pause_s
        try:
            self._package = importlib.import_module("e2b")
        except ImportError:
            raise UserError("--sandbox e2b needs the package e2b, which is not installed: pip install e2b") from None
        self._sandbox: Any = None

    @property
    def sandbox_id(self) -> str:
        return "" if self._sandbox is None else str(self._sandbox.sandbox_id)

    async def __aenter__(self) -> Self:
        metadata = dict(self.metadata)
        if self.image is not None:
            metadata[read_setting("SANDBOX_IMAGE_METADATA_KEY", "image")] = self.image
        if size := read_setting("E2B_SANDBOX_SIZE", ""):
            metadata["size"] = size
        options: JsonObject = {
            "timeout": int(read_setting("SANDBOX_LIFETIME_SEC", "3600")), "metadata": metadata, "envs": self.env
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
        envs = {**self.env, **(env or {})}

        def run() -> Awaitable[Any]:
            return self._running.commands.run(line, user=user, envs=envs, timeout=seconds)

        try:
            result = await self._call("run a command", run, retry=idempotent)
        except self._package.CommandExitException as ended:
            outcome = Outcome(ended.exit_code, ended.stdout, ended.stderr)
        except self._package.TimeoutException:
            outcome = Outcome(EXIT_TIME_BUDGET_EXCEEDED, "", "", TIMEOUT)
        else:
            outcome = Outcome(result.exit_code, result.stdout, result.stderr)
        if check and outcome.code != 0:
            shown = line if len(line) <= 200 else line[:200] + "..."
            raise CommandFailed(
                f"exit code {outcome.code} of {shown!r}: {outcome.cause or outcome.err[-500:]}", outcome
            )
        return outcome

    async def write_file(self, path: str, content: str | bytes | Path, *, user: str = "root") -> None:
        """Write a file, creating its parent folders; a `Path` as content is a file of the host."""
        data = await asyncio.to_thread(content.read_bytes) if isinstance(content, Path) else content
        await self._call(f"write {path}", lambda: self._running.files.write(path, data, user=user))

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """Read the text of a file."""
        try:
            return str(await self._call(f"read {path}", lambda: self._running.files.read(path, user=user)))
        except self._package.NotFoundException as error:
            raise FileNotFoundError(2, f"cannot read {path} in sandbox {self.sandbox_id}: {error}") from None

    async def reach(self, endpoint: str) -> str:
        """Return the same URL, which must be one that E2B's machines can reach."""
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or parts.hostname in _LOOPBACK:
            raise SandboxError(
                f"an E2B sandbox is on another machine and cannot reach {endpoint}: set --host, --agent-server-port "
                "and --agent-public-url"
            )
        return endpoint.rstrip("/")

    @property
    def _running(self) -> Any:
        if self._sandbox is None:
            raise SandboxError("this E2B sandbox is not started: use `async with`")
        return self._sandbox

    async def _call(self, what: str, call: Callable[[], Awaitable[Value]], *, retry: bool = True) -> Value:
        attempt = 0
        while True:
            try:
                return await call()
            except Exception as error:  # from the package, its HTTP client or the socket; sorted by name below
                if type(error).__name__ in _REQUEST_ERRORS or isinstance(error, SandboxError):
                    raise
                if not retry or attempt >= self.retries:
                    tries = f" after {attempt + 1} tries" if attempt else ""
                    raise SandboxError(f"E2B could not {what}{tries}: {type(error).__name__}: {error}") from error
            await asyncio.sleep(self.pause(attempt))
            attempt += 1
