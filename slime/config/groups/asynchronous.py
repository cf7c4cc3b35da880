"""Whether generation goes on while the trainers work, and how old a sample may be when it is trained on."""

from dataclasses import dataclass

from slime.config.flag import at_least, flag

SYNC, ONE_STEP, FULL = "sync", "one-step", "full"
FULLY_ASYNC_ROLLOUT_FUNCTION = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"


@dataclass(frozen=True, kw_only=True)
class AsyncFlags:
    """Asynchronous: generating while training"""

    async_mode: str = flag(
        None,
        "sync: generate, then train; one-step: the next rollout is generated while one is trained on; full: generation "
        "never stops, and weights change under running requests",
        choices=(SYNC, ONE_STEP, FULL),
        derived="sync; one-step for slime train-async and train_async.py",
    )
    update_weights_interval: int = flag(
        1, "new weights go to the engines every so many rollout steps", check=at_least(1)
    )
    async_buffer_size: int = flag(1, "one-step: rollouts that may lie ready before the trainers", check=at_least(1))
    max_weight_staleness: int | None = flag(
        None,
        "most rollout steps that the weights which sampled a token may be behind when it is trained on; 0: synchronous",
        check=at_least(0),
        derived="2 in full mode, else no bound",
    )
    stale_samples: str = flag(
        "regenerate",
        "what becomes of samples that are older than --max-weight-staleness all the same: sampled anew, or left out",
        choices=("regenerate", "drop"),
    )
