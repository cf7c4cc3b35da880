"""Local sandboxes of every kind; a kind that this machine does not support must raise an error with the reason."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from slime.agent.sandbox.host_sandbox import MachineSandbox
from slime.agent.sandbox.local import LocalSandbox, unavailable_reason
from slime.agent.sandbox.registry import SubprocessSandbox
from slime.errors import UserError

LOCAL = ("unshare", "bwrap")
ALL = (*LOCAL, "subprocess")


def box(way: str, **options: Any) -> MachineSandbox | None:
    """Return a sandbox of that kind, or None where this machine does not support it, after checking the error."""
    if way == "subprocess":
        return SubprocessSandbox(**options)
    if (why := unavailable_reason(way)) is not None:
        with pytest.raises(UserError, match="this machine has no local sandbox") as said:
            LocalSandbox(via=way)
        assert why in str(said.value)
        return None
    return LocalSandbox(via=way, **options)


def inside(way: str, use: Callable[[MachineSandbox], Awaitable[None]], **options: Any) -> None:
    """Start a sandbox, use it and end it."""
    made = box(way, **options)
    if made is None:
        return

    async def run() -> None:
        async with made as sandbox:
            await asyncio.wait_for(use(sandbox), 280)

    asyncio.run(run())


def alive(mark: str) -> list[int]:
    """Return the processes of this machine whose environment or command line contains the mark."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        for file in ("cmdline", "environ"):
            try:
                with open(f"/proc/{name}/{file}", "rb") as stream:
                    if mark.encode() in stream.read():
                        found.append(int(name))
                        break
            except OSError:
                continue
    return found


def wait_until(true: Callable[[], bool], seconds: float = 120.0) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come to hold"
        time.sleep(0.01)
