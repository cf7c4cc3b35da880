"""E2B sandboxes against a fake `e2b` package: calls, arguments and retries."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from slime.agent.sandbox import CommandFailed, E2BSandbox, Sandbox, SandboxError, make_sandbox
from slime.agent.sandbox.e2b import LONGEST_PAUSE_S, retry_pause_s
from slime.errors import UserError


class CommandExitException(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"exit {code}")
        self.exit_code, self.stdout, self.stderr = code, "out", "err"


class TimeoutException(Exception):
    pass


class NotFoundException(Exception):
    pass


class FakeE2BSandbox:
    """Fake of the package's sandbox that records calls; each call first raises the next of `failures`, if any."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.failures: list[Exception] = []
        self.sandbox_id = "remote-1"
        self.commands = SimpleNamespace(run=self.run)
        self.files = SimpleNamespace(write=self.write, read=self.read)
        self.store: dict[str, Any] = {}

    def happened(self, what: str, details: Any) -> None:
        self.calls.append((what, details))
        if self.failures:
            raise self.failures.pop(0)

    async def create(self, **options: Any) -> FakeE2BSandbox:
        self.happened("create", options)
        return self

    async def kill(self) -> None:
        self.happened("kill", None)

    async def run(self, line: str, **options: Any) -> Any:
        self.happened("run", (line, options))
        if line.startswith("exit "):
            raise CommandExitException(int(line.split()[1]))
        if line == "sleep":
            raise TimeoutException("too long")
        return SimpleNamespace(exit_code=0, stdout=f"ran {line}", stderr="")

    async def write(self, path: str, data: Any, user: str) -> None:
        self.happened("write", (path, user))
        self.store[path] = data

    async def read(self, path: str, user: str) -> str:
        self.happened("read", path)
        if path not in self.store:
            raise NotFoundException(path)
        return self.store[path]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeE2BSandbox:
    package = ModuleType("e2b")
    server = FakeE2BSandbox()
    package.AsyncSandbox = SimpleNamespace(create=server.create)  # type: ignore[attr-defined]
    for kind in (CommandExitException, TimeoutException, NotFoundException):
        setattr(package, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, "e2b", package)
    return server


def test_sandbox_methods_map_to_e2b_calls(
    server: FakeE2BSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY", "docker_image")
    monkeypatch.setenv("SWE_SANDBOX_LIFETIME_SEC", "900")
    monkeypatch.setenv("SLIME_AGENT_E2B_SANDBOX_SIZE", "large")
    local = tmp_path / "a.bin"
    local.write_bytes(b"\0\1")

    async def run() -> None:
        async with E2BSandbox("repo/task:1", env={"A": "1"}) as sandbox:
            assert isinstance(sandbox, Sandbox)
            assert sandbox.sandbox_id == "remote-1"
            assert await sandbox.exec(["ls", "a b"], user="agent", env={"B": "2"}, timeout=5) == (0, "ran ls 'a b'", "")
            assert await sandbox.exec("exit 3") == (3, "out", "err")
            assert (await sandbox.exec("sleep")).cause == "timeout"
            with pytest.raises(CommandFailed, match="exit code 4 of 'exit 4': err"):
                await sandbox.exec("exit 4", check=True)
            await sandbox.write_file("/x", local)
            assert server.store["/x"] == b"\0\1"
            await sandbox.write_file("/y", "text", user="agent")
            assert await sandbox.read_file("/y") == "text"
            with pytest.raises(FileNotFoundError, match="cannot read /none in sandbox remote-1"):
                await sandbox.read_file("/none")
            assert await sandbox.reach("https://gpu.example.org/s/") == "https://gpu.example.org/s"
            with pytest.raises(SandboxError, match="on another machine and cannot reach http://127"):
                await sandbox.reach("http://127.0.0.1:1")

    asyncio.run(run())
    assert server.calls[0] == (
        "create",
        {"timeout": 900, "metadata": {"docker_image": "repo/task:1", "size": "large"}, "envs": {"A": "1"}},
    )
    assert server.calls[1] == ("run", ("ls 'a b'", {"user": "agent", "envs": {"A": "1", "B": "2"}, "timeout": 5}))
    assert server.calls[2][1][1] == {"user": "root", "envs": {"A": "1"}, "timeout": 120}
    assert server.calls[-1] == ("kill", None)


def test_idempotent_calls_are_retried_six_times_and_others_never(server: FakeE2BSandbox) -> None:
    async def run() -> None:
        async with E2BSandbox() as sandbox:
            waited: list[int] = []
            sandbox.pause = lambda attempt: waited.append(attempt) or 0.0  # type: ignore[func-returns-value]
            server.failures = [ConnectionError("reset")] * 6
            assert (await sandbox.exec("again")).out == "ran again"
            assert waited == [0, 1, 2, 3, 4, 5]
            server.failures = [ConnectionError("reset")] * 7
            with pytest.raises(SandboxError, match="E2B could not run a command after 7 tries: ConnectionError: reset"):
                await sandbox.exec("again")
            before = len(server.calls)
            server.failures = [ConnectionError("reset")]
            with pytest.raises(SandboxError, match="E2B could not run a command: ConnectionError: reset"):
                await sandbox.exec("once", idempotent=False)
            assert len(server.calls) == before + 1

    asyncio.run(run())


def test_retry_pauses_stay_below_an_exponential_bound() -> None:
    for attempt in range(12):
        pauses = [retry_pause_s(attempt) for _ in range(50)]
        assert 0 <= min(pauses) < max(pauses) <= min(LONGEST_PAUSE_S, 2**attempt)


def test_missing_e2b_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "e2b", None)
    with pytest.raises(UserError, match="needs the package e2b, which is not installed: pip install e2b"):
        make_sandbox("e2b")
