"""What one sandbox may use."""

from __future__ import annotations

from dataclasses import dataclass

from slime.errors import UserError


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Memory, processes and files are those of the whole sandbox, the rest of one command."""

    seconds: float = 120.0
    """How long a command may take, unless its caller says otherwise."""
    grace_seconds: float = 1.0
    """Between asking a command to end and ending it."""
    memory_mb: int = 4096
    """Of all processes together, with the files they wrote: these are in memory."""
    processes: int = 512
    cpus: float | None = None
    cpu_seconds: int = 3600
    """Of one process."""
    disk_mb: int = 2048
    """All that the sandbox writes."""
    file_mb: int = 1024
    """One file."""
    open_files: int = 4096
    """Of one process."""
    output_kb: int = 256
    """What is kept of each output stream of a command: its beginning and its end."""
    output_mb: int = 64
    """What a command may write to its output streams before it is ended."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise UserError(f"the limit {name} of a sandbox must be more than 0, not {value}: change it")

    def of_each_process(self, held: frozenset[str]) -> dict[str, int]:
        """By the kernel's names. `held` are the limits that hold for all processes together, by a control group."""
        limits = {
            "FSIZE": self.file_mb << 20,
            "CPU": self.cpu_seconds,
            "NOFILE": self.open_files,
            "CORE": 0,
            "NPROC": self.processes * 2 if "processes" in held else self.processes,
        }
        if "memory" not in held:
            limits["DATA"] = self.memory_mb << 20
        return limits

    def of_the_group(self) -> dict[str, float]:
        """What a control group is asked to hold."""
        limits: dict[str, float] = {"memory": self.memory_mb << 20, "processes": self.processes}
        return limits if self.cpus is None else {**limits, "cpus": self.cpus}
