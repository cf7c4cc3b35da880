"""Commands that take as long as a whole attempt, and the user they run as: upstream's functions, for any sandbox."""

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
    """The exit code of a long command, or EXIT_TIME_BUDGET_EXCEEDED; what it printed is in `log_of(tag)`.

    In a sandbox of this machine it is one command. Elsewhere a connection may not live that long: the command runs
    detached and leaves its exit code in a file, which is looked for now and then.
    """
    log = log_of(tag)
    if isinstance(sb, MachineSandbox):
        line = f"{{\n{cmd}\n}} > {_in_machine(sb, log)} 2>&1"
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
            return _exit_code(out, tag)
        left = deadline - time.monotonic()
        if left <= 0:
            await sb.exec(f"kill -KILL -- -$(cat {pid})", user=user, timeout=_CONTROL_S)
            return EXIT_TIME_BUDGET_EXCEEDED
        await asyncio.sleep(min(poll_interval_sec, left))


def log_of(tag: str) -> str:
    """Where the output of a long command is, in the sandbox."""
    if not re.fullmatch(r"[A-Za-z0-9._-]+", tag):
        raise ValueError(f"{tag!r} is no tag: letters, digits, dots, dashes and underscores")
    return f"/tmp/slime-{tag}.log"


async def ensure_agent_user(sb: Sandbox) -> None:
    """Make the user `agent` with a home folder, where the sandbox has none; agents refuse to work as root."""
    if isinstance(sb, MachineSandbox):
        return  # its one user is no root, or the one who started it
    have = "id -u agent >/dev/null 2>&1"
    await sb.exec(f"{have} || useradd -m -s /bin/bash agent || adduser -D agent", user="root", check=True)


def _in_machine(sb: MachineSandbox, log: str) -> str:
    return log if sb.own_processes else shlex.quote(f"{sb.home}/{log.rpartition('/')[2]}")


def _exit_code(text: str, tag: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise SandboxError(f"the file that should hold the exit code of {tag} holds {text[:80]!r}") from None
