"""Sandboxes that agents work in: the protocol, its backends, and the names that upstream exports here."""

from slime.agent.sandbox.e2b import E2BSandbox
from slime.agent.sandbox.long_commands import ensure_agent_user, exec_and_wait
from slime.agent.sandbox.protocol import (
    EXIT_TIME_BUDGET_EXCEEDED,
    Changes,
    CommandFailed,
    Outcome,
    Process,
    Sandbox,
    SandboxError,
    SandboxGone,
    SandboxLimits,
    Snapshot,
)
from slime.agent.sandbox.registry import make_sandbox, sandbox_from

__all__ = [
    "EXIT_TIME_BUDGET_EXCEEDED",
    "Changes",
    "CommandFailed",
    "E2BSandbox",
    "Outcome",
    "Process",
    "Sandbox",
    "SandboxError",
    "SandboxGone",
    "SandboxLimits",
    "Snapshot",
    "ensure_agent_user",
    "exec_and_wait",
    "make_sandbox",
    "sandbox_from",
]
