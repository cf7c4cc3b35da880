"""What is saved, and where a run continues from."""

from dataclasses import dataclass

from slime.config.flag import at_least, flag


@dataclass(frozen=True, kw_only=True)
class CheckpointFlags:
    """Checkpoints"""

    save: str | None = flag(
        None, "folder for checkpoints", metavar="DIR", derived="the run folder where --save-interval is given"
    )
    load: str | None = flag(
        None,
        "checkpoint folder to continue from (nothing there yet: a fresh start), or a model folder; the same as --save "
        "makes a run resumable",
        metavar="DIR",
    )
    ckpt_step: int | None = flag(None, "which checkpoint of --load, not the latest", check=at_least(0))
    save_interval: int | None = flag(None, "save every so many rollout steps, and at the end", check=at_least(1))
    async_save: bool = flag(
        False, "train on while a checkpoint is written, from a copy of weights and optimizer in host memory"
    )
    save_hf: str | None = flag(
        None, "also save a Hugging Face folder; {rollout_id} in the name is filled in", metavar="DIR"
    )
    no_load_optim: bool = flag(False, "Adam starts fresh, whatever the checkpoint of --load has of it")
    no_load_rng: bool = flag(False, "random states start from --seed, whatever the checkpoint of --load has of them")
    no_save_optim: bool = flag(False, "leave the optimizer state out of checkpoints")
    ckpt_keep: int | None = flag(None, "keep only the last so many checkpoints", check=at_least(1), derived="all")
    keep_samples: bool = flag(
        False, "all samples stay in the journal of the run folder; otherwise only the last that a checkpoint covers"
    )
    keep_samples_mb: float = flag(
        256,
        "so many MB of samples that were trained on last stay in the journal to be looked at, and as many of "
        "evaluations; 0: none",
        metavar="MB",
        check=at_least(0),
    )
    seed: int = flag(1234, "seed of everything random in training")
