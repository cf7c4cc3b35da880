"""Flags of the model, LoRA adapters, the optimizer and its schedules, and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import above, at_least, between, flag

# ruff: noqa: RUF009 (`flag` declares a dataclass field)


DTYPES = ("auto", "float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Model: weights and precision"""

    hf_checkpoint: str = flag(
        None, "Hugging Face model folder: weights, config and tokenizer to start from", metavar="DIR", required=True
    )
    dtype: str = flag(
        "auto",
        "compute precision; auto: bfloat16 on CUDA and on a CPU with bfloat16 units (models of 50 M parameters and "
        "more), else float32",
        choices=DTYPES,
    )
    rollout_dtype: str = flag("auto", "precision of the inference engines; auto: same as --dtype", choices=DTYPES)
    fp8: bool = flag(
        False,
        "compute matrix products of the decoder layers in 8-bit floats (e4m3, a scale for each row) in the forward "
        "pass, in bfloat16 in the backward pass; needs GPUs of compute capability 8.9 or newer",
    )
    recompute_activations: bool = flag(
        False, "recompute activations in the backward pass: less memory, about a third more work"
    )
    share_prompts: bool | None = flag(
        None,
        "compute common prefixes of the samples of a micro-batch, such as prompts, once in the trainer: the same "
        "results up to rounding, less work for long prompts",
        derived="on where backend, layout and model allow it",
    )
    recompute_loss_function: bool = flag(
        False, "call custom losses again in the backward pass instead of keeping their intermediate results"
    )
    qwen_gdn_backend: str | None = flag(
        None,
        "kernels of gated delta nets (Qwen3-Next, Qwen3.5), which are refused if they cannot run; default: fla on "
        "GPUs where it is installed, else torch",
        choices=("fla", "flashqla"),
    )
    trust_remote_code: bool = flag(False, "run model code that ships inside the model folder")
    freeze_params_name_list: list[str] | None = flag(
        None, "regular expressions of parameter names that are not trained", metavar="REGEX"
    )
    freeze_indexer: bool = flag(False, "do not train the indexers of sparse attention")
    only_train_params_name_list: list[str] | None = flag(
        None, "regular expressions of the only parameter names that are trained", metavar="REGEX"
    )


@dataclass(frozen=True, kw_only=True)
class LoraFlags:
    """LoRA: adapters of frozen weights"""

    lora_rank: int = flag(
        0,
        "rank of the adapters' matrices; 0: all weights are trained",
        check=at_least(0),
        derived="0; that of --lora-load",
    )
    lora_alpha: float | None = flag(
        None,
        "scale: the product of the two matrices is added to the weights, times alpha / rank",
        check=above(0),
        derived="twice --lora-rank; that of --lora-load",
    )
    lora_target_modules: list[str] | None = flag(
        None,
        "linear layers with adapters, by their names or the last parts of these (q_proj, mlp.down_proj); all-linear: "
        "all except the output layer",
        metavar="NAME",
        derived="all-linear; those of --lora-load",
    )
    lora_load: str | None = flag(
        None, "folder of the adapter to start from, as saved by PEFT, or by --save-hf in adapter/", metavar="DIR"
    )
    lora_sync: str = flag(
        "merged",
        "weights sent to the engines: all weights with the adapter merged into them, or only the adapter, which they "
        "add to the weights of --hf-checkpoint",
        choices=("merged", "adapter"),
    )


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
