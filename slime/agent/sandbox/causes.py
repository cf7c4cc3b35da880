"""Which limit a command ran into, from what the kernel counted, how it ended, and what it said."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from slime.agent.sandbox.limits import SandboxLimits
from slime.agent.sandbox.protocol import CPU_TIME, DISK, FILE_SIZE, MEMORY, PROCESSES

_OF_SIGNAL = {128 + signal.SIGXCPU: CPU_TIME, 128 + signal.SIGXFSZ: FILE_SIZE}
_SAID = (
    ("File too large", FILE_SIZE),
    ("No space left on device", DISK),
    ("fork: retry: Resource temporarily unavailable", PROCESSES),
    ("fork: Resource temporarily unavailable", PROCESSES),
    ("Cannot allocate memory", MEMORY),
    ("MemoryError", MEMORY),
)
_TAIL = 4096


def cause_of(
    told: Mapping[str, Any],
    err: str,
    before: Mapping[str, int],
    after: Mapping[str, int],
    limits: SandboxLimits,
    held: frozenset[str],
) -> str | None:
    """The worker's own verdict first, then what was counted while the command ran, then how it failed."""
    if told["cause"] is not None:
        return str(told["cause"])
    for limit in (MEMORY, PROCESSES):
        if after[limit] > before[limit]:
            return limit
    if told["code"] == 0:
        return None
    if told["code"] in _OF_SIGNAL:
        return _OF_SIGNAL[told["code"]]
    if told["code"] == 128 + signal.SIGKILL and told["cpu_s"] >= limits.cpu_seconds:
        return CPU_TIME
    return next((cause for words, cause in _SAID if words in err[-_TAIL:] and cause not in held), None)
