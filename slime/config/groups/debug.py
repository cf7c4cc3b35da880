"""Looking before running."""

from dataclasses import dataclass

from slime.config.flag import flag


@dataclass(frozen=True, kw_only=True)
class DebugFlags:
    """Debugging"""

    dry_run: bool = flag(False, "print the plan (processes, batches, memory, files) and exit")
    ci_test: bool = flag(
        False, "end the run when its log-probs contradict each other: KL before any update, trainer against engine"
    )
