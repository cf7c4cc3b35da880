"""Long-running commands, in local sandboxes and in one that implements only upstream's protocol."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from slime.agent.sandbox import EXIT_TIME_BUDGET_EXCEEDED, ensure_agent_user, exec_and_wait, make_sandbox
from slime.agent.sandbox.host_sandbox import MachineSandbox
from tests.agent.sandbox.boxes import ALL, alive, inside, wait_until


class UpstreamSandbox:
    """Sandbox that implements only upstream's protocol and delegates to a real one."""

    def __init__(self, below: MachineSandbox) -> None:
        self.below = below
        self.lines: list[str] = []
        self.sandbox_id = "upstream"

    async def __aenter__(self) -> Self:
        await self.below.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.below.__aexit__(*exc)

    async def exec(self, cmd: str, **options: Any) -> tuple[int, str, str]:
        self.lines.append(cmd)
        code, out, err = await self.below.exec(cmd, **options)
        return code, out, err

    async def write_file(self, path: str, content: Any, *, user: str = "root") -> None:
        await self.below.write_file(path, content)

    async def read_file(self, path: str, *, user: str = "root") -> str:
        return await self.below.read_file(path)


@pytest.mark.parametrize("way", ALL)
def test_exec_and_wait_returns_the_exit_code_or_a_timeout(way: str) -> None:
    async def use(sandbox: MachineSandbox) -> None:
        assert await exec_and_wait(sandbox, cmd="echo said; exit 7", time_budget_sec=60, tag="one") == 7
        logs = await sandbox.exec("cat /tmp/slime-one.log ~/slime-one.log 2>/dev/null")
        assert logs.out == "said\n"
        code = await exec_and_wait(sandbox, cmd="sleep 600", time_budget_sec=0.2, tag="two")
        assert code == EXIT_TIME_BUDGET_EXCEEDED == -1
        await ensure_agent_user(sandbox)

    inside(way, use)


def has_started(mark: str) -> bool:
    """Return true if the environment of a process has the mark; a shell's command line may contain it earlier."""
    for pid in alive(mark):
        with contextlib.suppress(OSError):
            if f"MARK={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                return True
    return False


def test_upstream_sandbox_is_polled_until_exit_or_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"sandbox-detached-{os.urandom(8).hex()}"
    reads = itertools.count()  # the first read sets the deadline, even if the command has begun
    clock = SimpleNamespace(monotonic=lambda: 1000.0 if next(reads) and has_started(mark) else 0.0)

    async def run() -> None:
        tag = f"test-{os.urandom(6).hex()}"
        try:
            async with UpstreamSandbox(make_sandbox("auto")) as sandbox:
                run_one = {"time_budget_sec": 60, "poll_interval_sec": 0.01}
                line = "echo 'it''s' \"$WHAT\"; exit 7"
                assert await exec_and_wait(sandbox, cmd=line, tag=tag, env={"WHAT": "here"}, **run_one) == 7
                assert (await sandbox.exec(f"cat /tmp/slime-{tag}.log"))[1] == "its here\n"
                endless = f"MARK={mark} sleep 600; true"
                monkeypatch.setattr("slime.agent.sandbox.long_commands.time", clock)
                code = await exec_and_wait(
                    sandbox, cmd=endless, time_budget_sec=100, tag=f"{tag}-2", poll_interval_sec=0.05
                )
                assert code == EXIT_TIME_BUDGET_EXCEEDED
                await asyncio.to_thread(wait_until, lambda: not alive(mark))
                await ensure_agent_user(sandbox)
                assert "id -u agent" in sandbox.lines[-1]
        finally:
            await (await asyncio.create_subprocess_exec("sh", "-c", f"rm -f /tmp/slime-{tag}*")).wait()

    asyncio.run(run())


def test_rejects_a_tag_with_path_or_shell_characters() -> None:
    async def run() -> None:
        await exec_and_wait(make_sandbox("subprocess"), cmd="true", time_budget_sec=1, tag="../x; rm -r /")

    with pytest.raises(ValueError, match="is not a valid tag"):
        asyncio.run(run())
