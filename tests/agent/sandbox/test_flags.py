"""Sandbox flags set the limits of the sandboxes of a run."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from slime.agent.sandbox import sandbox_from
from slime.agent.sandbox.registry import SubprocessSandbox
from slime.errors import UserError


def flags(**changed: Any) -> SimpleNamespace:
    defaults = {
        "sandbox": "subprocess", "sandbox_image": None, "sandbox_timeout": 0.2, "sandbox_memory_mb": 512,
        "sandbox_processes": 64, "sandbox_disk_mb": 16,
    }  # fmt: skip
    return SimpleNamespace(**{**defaults, **changed})


def test_sandbox_limits_come_from_the_flags() -> None:
    async def run() -> str | None:
        async with sandbox_from(flags(), env={"A": "b"}) as sandbox:
            assert isinstance(sandbox, SubprocessSandbox)
            limits = sandbox.limits
            assert (limits.memory_mb, limits.processes, limits.disk_mb) == (512, 64, 16)
            assert (await sandbox.exec("echo $A", timeout=120)).out == "b\n"
            return (await sandbox.exec("sleep 600")).cause

    assert asyncio.run(run()) == "timeout"


def test_e2b_rejects_visible_folders_of_this_machine() -> None:
    with pytest.raises(
        UserError, match="--sandbox e2b starts from an image and sees no folder or device of this machine"
    ):
        sandbox_from(flags(sandbox="e2b"), visible=["/usr"])
