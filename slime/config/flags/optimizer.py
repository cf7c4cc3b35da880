"""Flags of the optimizer, its schedules, and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import above, at_least, between, flag


@dataclass(frozen=True, kw_only=True)
class OptimizerFlags:
    """Optimizer"""

    optimizer: str = flag("adam", "optimizer (AdamW)", choices=("adam",), later=("sgd",))
    lr: float = flag(1e-6, "peak learning rate", check=at_least(0))
    min_lr: float = flag(0.0, "learning rate at the end of the decay", check=at_least(0))
    lr_decay_style: str = flag(
        "constant",
        "shape of the decay",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_warmup_iters: int = flag(0, "optimizer steps of linear warm-up", check=at_least(0))
    lr_warmup_fraction: float | None = flag(
        None, "fraction of --lr-decay-iters that is warm-up", check=between(0, 1, high_open=True)
    )
    lr_warmup_samples: int = flag(0, "warm-up in rollouts: steps times --global-batch-size", check=at_least(0))
    lr_warmup_init: float = flag(0.0, "learning rate of the first step of a warm-up", check=at_least(0))
    lr_decay_iters: int | None = flag(
        None,
        "optimizer steps until --min-lr, those of the warm-up included",
        check=at_least(1),
        derived="all steps of the run",
    )
    lr_decay_samples: int | None = flag(None, "length of the decay in rollouts", check=at_least(1))
    lr_wsd_decay_iters: int | None = flag(
        None, "WSD: optimizer steps of the decay at the end of --lr-decay-iters", check=at_least(1)
    )
    lr_wsd_decay_style: str = flag(
        "exponential", "WSD: shape of that decay", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    weight_decay: float = flag(0.0, "decoupled weight decay", check=at_least(0))
    start_weight_decay: float | None = flag(None, "initial weight decay", check=at_least(0), derived="--weight-decay")
    end_weight_decay: float | None = flag(None, "final weight decay", check=at_least(0), derived="--weight-decay")
    weight_decay_incr_style: str = flag(
        "constant",
        "shape of the change from --start-weight-decay to --end-weight-decay",
        choices=("constant", "linear", "cosine"),
    )
    use_stateless_adam: bool = flag(False, "Adam without optimizer state: every step is computed as a first step")
    exp_avg_dtype: str = flag(
        "fp32",
        "storage type of the first moment; bf16 uses stochastic rounding, the arithmetic stays float32",
        choices=("fp32", "bf16"),
        later=("fp16", "fp8"),
    )
    exp_avg_sq_dtype: str = flag(
        "fp32", "storage type of the second moment", choices=("fp32", "bf16"), later=("fp16", "fp8")
    )
    optimizer_cpu_offload: bool = flag(
        False, "keep the moments in host memory; they pass through the GPU in each update"
    )
    fsdp_cpu_offload: bool = flag(
        False,
        "keep weights, gradients and moments in host memory and update them there; layers are copied to the GPU when "
        "they are used",
    )
    adam_beta1: float = flag(0.9, "decay of the first moment", check=between(0, 1, high_open=True))
    adam_beta2: float = flag(0.95, "decay of the second moment", check=between(0, 1, high_open=True))
    adam_eps: float = flag(1e-8, "added to the denominator", check=above(0))
    clip_grad: float = flag(1.0, "largest global gradient norm; 0: no clipping", check=at_least(0))
    max_skipped_steps: int = flag(
        3,
        "consecutive optimizer steps skipped for a non-finite loss or gradient, after which the run ends; a "
        "rollout that is skipped before its first step counts as one; --max-restarts starts the run again",
        check=at_least(1),
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointFlags:
    """Checkpoints"""

    save: str | None = flag(
        None, "folder for checkpoints", metavar="DIR", derived="the run folder where --save-interval is given"
    )
    load: str | None = flag(
        None,
        "checkpoint folder to resume from (without a checkpoint: a fresh start), or a model folder; the same as --save "
        "makes a run resumable",
        metavar="DIR",
    )
    ckpt_step: int | None = flag(
        None, "iteration of the checkpoint in --load, instead of the latest", check=at_least(0)
    )
    save_interval: int | None = flag(
        None, "rollout steps between checkpoints; also saves at the end", check=at_least(1)
    )
    async_save: bool = flag(
        False, "continue training while a checkpoint is written, from a copy of weights and optimizer in host memory"
    )
    save_hf: str | None = flag(
        None, "also save a Hugging Face folder; {rollout_id} in the name is filled in", metavar="DIR"
    )
    no_load_optim: bool = flag(False, "start Adam fresh, without the optimizer state of the checkpoint")
    no_load_rng: bool = flag(False, "start random states from --seed, without those of the checkpoint")
    no_save_optim: bool = flag(False, "leave the optimizer state out of checkpoints")
    ckpt_keep: int | None = flag(None, "number of latest checkpoints to keep", check=at_least(1), derived="all")
    keep_samples: bool = flag(
        False, "keep all samples in the journal of the run folder, instead of only the last that a checkpoint covers"
    )
    keep_samples_mb: float = flag(
        256,
        "MB of the latest trained samples that the journal keeps for inspection, and as many of evaluations; 0: none",
        metavar="MB",
        check=at_least(0),
    )
    seed: int = flag(1234, "random seed of training")
