"""Runs commands that last for a whole attempt, and creates their user: upstream's functions, for any sandbox."""

from __future__ import annotations

import asyncio
import re
import shlex
import time
from collections.abc import Mapping

from slime.agent.sandbox.host_sandbox import MachineSandbox
from slime.agent.sandbox.protocol import EXIT_TIME_BUDGET_EXCEEDED, Sandbox, SandboxError

POLL_S = 5.0
_CONTROL_S = 60.0


async def exec_and_wait(
    sb: Sandbox,
    *,
    cmd: str,
    time_budget_sec: float,
    tag: str,
    user: str = "agent",
    env: Mapping[str, str] | None = None,
    poll_interval_sec: float = POLL_S,
) -> int:
    """Run a long command; return its exit code or EXIT_TIME_BUDGET_EXCEEDED. Its output is in `output_log_path(tag)`.

    In a sandbox of this machine it is one command. In other sandboxes a connection may not last that long: the command
    runs detached and writes its exit code to a file, which is polled every `poll_interval_sec`.
    """
    log = output_log_path(tag)
    if isinstance(sb, MachineSandbox):
        target = log if sb.own_processes else shlex.quote(f"{sb.home}/{log.rpartition('/')[2]}")
        line = f"{{\n{cmd}\n}} > {target} 2>&1"
        outcome = await sb.exec(line, user=user, env=env, timeout=time_budget_sec)
        return outcome.code
    done, pid = log.removesuffix(".log") + ".done", log.removesuffix(".log") + ".pid"
    inner = f"(\n{cmd}\n) > {log} 2>&1; echo $? > {done}.new; mv {done}.new {done}"
    start = f"rm -f {done}; setsid nohup sh -c {shlex.quote(inner)} < /dev/null > /dev/null 2>&1 & echo $! > {pid}"
    await sb.exec(start, user=user, env=env, timeout=_CONTROL_S, check=True, idempotent=False)
    deadline = time.monotonic() + time_budget_sec
    while True:
        code, out, _ = await sb.exec(f"cat {done} 2>/dev/null", user=user, timeout=_CONTROL_S)
        if code == 0 and out.strip():
            try:
                return int(out)
            except ValueError:
                raise SandboxError(f"the exit code file of {tag} holds {out[:80]!r}, which is not a number") from None
        left = deadline - time.monotonic()
        if left <= 0:
            await sb.exec(f"kill -KILL -- -$(cat {pid})", user=user, timeout=_CONTROL_S)
            return EXIT_TIME_BUDGET_EXCEEDED
        await asyncio.sleep(min(poll_interval_sec, left))


def output_log_path(tag: str) -> str:
    """Path, in the sandbox, of the output of a long command."""
    if not re.fullmatch(r"[A-Za-z0-9._-]+", tag):
        raise ValueError(f"{tag!r} is not a valid tag: use letters, digits, dots, dashes and underscores")
    return f"/tmp/slime-{tag}.log"


async def ensure_agent_user(sb: Sandbox) -> None:
    """Create the user `agent` with a home folder if the sandbox has none; agents refuse to work as root."""
    if isinstance(sb, MachineSandbox):
        return  # its only user is not root, or is the user that started it
    have = "id -u agent >/dev/null 2>&1"
    await sb.exec(f"{have} || useradd -m -s /bin/bash agent || adduser -D agent", user="root", check=True)
