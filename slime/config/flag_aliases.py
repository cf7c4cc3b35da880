"""Flags of TRL, verl, prime-rl, OpenRLHF and other versions of slime, with their names here; and refused flags.

Invariant: every flag that a remedy names exists. A remedy that begins with a flag is the name of the setting here; any
other remedy is a complete sentence. `REFUSED` has the flags of upstream slime that this version does not support.
"""

from __future__ import annotations

import re

from slime.config.megatron_flags import REFUSED_FIELDS

_QUANTISED = "training on quantised weights is not in this version: drop it"
_SERVED = "reward models are called over HTTP: serve it and give --rm-type remote_rm --rm-url URL"
_STEP = "samples of one optimizer step are --global-batch-size"
_SHARDED = "the model is sharded across the trainers, --actor-num-gpus-per-node sets their number: drop it"

_TRL = {
    "model-name-or-path": "--hf-checkpoint",
    "model-id": "--hf-checkpoint",
    "dataset-name": "--prompt-data, the path of a .jsonl or .parquet file",
    "train-dataset": "--prompt-data, the path of a .jsonl or .parquet file",
    "eval-dataset": "--eval-prompt-data NAME PATH",
    "reward-funcs": "--custom-rm-path, or slime.run(reward=function)",
    "reward-model-name-or-path": _SERVED,
    "learning-rate": "--lr",
    "lr-scheduler-type": "--lr-decay-style",
    "warmup-steps": "--lr-warmup-iters",
    "warmup-ratio": "--lr-warmup-iters, which counts optimizer steps",
    "max-grad-norm": "--clip-grad",
    "adam-epsilon": "--adam-eps",
    "num-generations": "--n-samples-per-prompt",
    "max-completion-length": "--rollout-max-response-len",
    "max-new-tokens": "--rollout-max-response-len",
    "max-prompt-length": "--rollout-max-prompt-len",
    "temperature": "--rollout-temperature",
    "top-p": "--rollout-top-p",
    "top-k": "--rollout-top-k",
    "per-device-train-batch-size": f"--micro-batch-size (samples of one forward pass); {_STEP}",
    "per-device-eval-batch-size": "engines batch evaluation by themselves: drop it",
    "gradient-accumulation-steps": "it follows from --global-batch-size and --micro-batch-size: drop it",
    "num-train-epochs": "--num-epoch",
    "max-steps": "--num-rollout, which counts rollout steps",
    "num-iterations": "--num-steps-per-rollout",
    "steps-per-generation": "--num-steps-per-rollout",
    "generation-batch-size": "--rollout-batch-size, which counts prompts",
    "beta": "--use-kl-loss with --kl-loss-coef",
    "epsilon": "--eps-clip",
    "epsilon-high": "--eps-clip-high",
    "delta": "--eps-clip-c",
    "scale-rewards": "rewards are scaled by default, --disable-grpo-std-normalization turns it off",
    "sync-ref-model": "--ref-update-interval",
    "gradient-checkpointing": "--recompute-activations",
    "torch-dtype": "--dtype",
    "use-vllm": "engines always generate, --rollout-backend chooses the kind: drop it",
    "vllm-mode": "--colocate, or --rollout-num-gpus for devices of their own",
    "save-steps": "--save-interval",
    "save-total-limit": "--ckpt-keep",
    "eval-steps": "--eval-interval",
    "logging-steps": "every step is logged: drop it",
    "logging-dir": "--output-dir",
    "report-to": "--use-wandb (TensorBoard files are always written)",
    "resume-from-checkpoint": "--load",
    "deepspeed": _SHARDED,
    "fsdp": _SHARDED,
    "attn-implementation": "attention is chosen by the trainer: drop it",
    "load-in-4bit": _QUANTISED,
    "load-in-8bit": _QUANTISED,
    "use-peft": "--lora-rank, which is enough",
    "lora-r": "--lora-rank",
    "lora-dropout": "there is no dropout in training: drop it",
}

_OPENRLHF = {
    "pretrain": "--hf-checkpoint",
    "critic-pretrain": "--critic-hf-checkpoint",
    "ref-pretrain": "--ref-load",
    "reward-pretrain": _SERVED,
    "remote-rm-url": "--rm-url with --rm-type remote_rm, or --custom-rm-path for a function in a file",
    "actor-learning-rate": "--lr",
    "critic-learning-rate": "--critic-lr",
    "micro-train-batch-size": f"--micro-batch-size; {_STEP}",
    "micro-rollout-batch-size": "engines batch by themselves: drop it",
    "train-batch-size": "--global-batch-size",
    "num-episodes": "--num-epoch, or --num-rollout for a number of steps",
    "max-epochs": "--num-steps-per-rollout",
    "prompt-max-len": "--rollout-max-prompt-len",
    "generate-max-len": "--rollout-max-response-len",
    "max-len": "--rollout-max-context-len",
    "init-kl-coef": "--kl-coef (in the reward), or --use-kl-loss with --kl-loss-coef",
    "kl-estimator": "--kl-loss-type",
    "eps-clip-low-high": "--eps-clip and --eps-clip-high",
    "entropy-loss-coef": "--entropy-coef",
    "max-norm": "--clip-grad",
    "lr-warmup-ratio": "--lr-warmup-iters, which counts optimizer steps",
    "vllm-num-engines": "--rollout-num-gpus over --rollout-num-gpus-per-engine",
    "vllm-tensor-parallel-size": "--rollout-num-gpus-per-engine",
    "vllm-gpu-memory-utilization": "--engine-mem-fraction, or --sglang-mem-fraction-static with SGLang",
    "colocate-all-models": "--colocate",
    "zero-stage": _SHARDED,
    "adam-offload": "--optimizer-cpu-offload",
    "packing-samples": "samples are always packed, --max-tokens-per-gpu bounds a row: drop it",
    "flash-attn": "attention is chosen by the trainer: drop it",
    "save-path": "--save-hf (a model folder), or --save (checkpoints)",
    "ckpt-path": "--save",
    "load-checkpoint": "--load",
    "dynamic-filtering": "--dynamic-sampling-filter-path",
    "agent-func-path": "--custom-generate-function-path",
    "target-modules": "--lora-target-modules",
}

_VERL = {
    "data.train-files": "--prompt-data",
    "data.val-files": "--eval-prompt-data NAME PATH",
    "data.train-batch-size": "--rollout-batch-size",
    "data.prompt-key": "--input-key",
    "data.max-prompt-length": "--rollout-max-prompt-len",
    "data.max-response-length": "--rollout-max-response-len",
    "data.shuffle": "--rollout-shuffle",
    "actor-rollout-ref.model.path": "--hf-checkpoint",
    "actor-rollout-ref.model.lora-rank": "--lora-rank",
    "actor-rollout-ref.model.lora-alpha": "--lora-alpha",
    "actor-rollout-ref.model.target-modules": "--lora-target-modules",
    "actor-rollout-ref.model.enable-gradient-checkpointing": "--recompute-activations",
    "actor-rollout-ref.actor.optim.lr": "--lr",
    "actor-rollout-ref.actor.ppo-mini-batch-size": "--global-batch-size, which counts samples and not prompts",
    "actor-rollout-ref.actor.ppo-micro-batch-size-per-gpu": "--micro-batch-size",
    "actor-rollout-ref.actor.ppo-max-token-len-per-gpu": "--max-tokens-per-gpu",
    "actor-rollout-ref.actor.use-dynamic-bsz": "--use-dynamic-batch-size",
    "actor-rollout-ref.actor.ppo-epochs": "--num-steps-per-rollout",
    "actor-rollout-ref.actor.use-kl-loss": "--use-kl-loss",
    "actor-rollout-ref.actor.kl-loss-coef": "--kl-loss-coef",
    "actor-rollout-ref.actor.kl-loss-type": "--kl-loss-type",
    "actor-rollout-ref.actor.entropy-coeff": "--entropy-coef",
    "actor-rollout-ref.actor.clip-ratio": "--eps-clip",
    "actor-rollout-ref.actor.clip-ratio-low": "--eps-clip",
    "actor-rollout-ref.actor.clip-ratio-high": "--eps-clip-high",
    "actor-rollout-ref.actor.clip-ratio-c": "--eps-clip-c",
    "actor-rollout-ref.actor.grad-clip": "--clip-grad",
    "actor-rollout-ref.actor.loss-agg-mode": "--loss-aggregation",
    "actor-rollout-ref.rollout.n": "--n-samples-per-prompt",
    "actor-rollout-ref.rollout.name": "--rollout-backend",
    "actor-rollout-ref.rollout.temperature": "--rollout-temperature",
    "actor-rollout-ref.rollout.top-p": "--rollout-top-p",
    "actor-rollout-ref.rollout.top-k": "--rollout-top-k",
    "actor-rollout-ref.rollout.tensor-model-parallel-size": "--rollout-num-gpus-per-engine",
    "actor-rollout-ref.rollout.gpu-memory-utilization": "--engine-mem-fraction, or --sglang-mem-fraction-static",
    "actor-rollout-ref.rollout.val-kwargs.n": "--n-samples-per-eval-prompt",
    "actor-rollout-ref.rollout.val-kwargs.temperature": "--eval-temperature",
    "algorithm.adv-estimator": "--advantage-estimator",
    "algorithm.kl-ctrl.kl-coef": "--kl-coef",
    "algorithm.gamma": "--gamma",
    "algorithm.lam": "--lambd",
    "critic.model.path": "--critic-hf-checkpoint",
    "critic.optim.lr": "--critic-lr",
    "reward-model.path": _SERVED,
    "custom-reward-function.path": "--custom-rm-path FILE.py:FUNCTION",
    "custom-reward-function.name": "--custom-rm-path FILE.py:FUNCTION",
    "trainer.total-epochs": "--num-epoch",
    "trainer.total-training-steps": "--num-rollout",
    "trainer.n-gpus-per-node": "--actor-num-gpus-per-node",
    "trainer.nnodes": "--actor-num-nodes",
    "trainer.save-freq": "--save-interval",
    "trainer.test-freq": "--eval-interval",
    "trainer.val-before-train": "it is on by default, --skip-eval-before-train turns it off",
    "trainer.default-local-dir": "--save",
    "trainer.project-name": "--wandb-project",
    "trainer.experiment-name": "--run-name",
    "trainer.logger": "--use-wandb (TensorBoard files are always written)",
}

_PRIME_RL = {
    "model.name": "--hf-checkpoint",
    "model.lora.rank": "--lora-rank",
    "seq-len": "--rollout-max-context-len",
    "trainer.model.name": "--hf-checkpoint",
    "trainer.optim.lr": "--lr",
    "trainer.optim.max-norm": "--clip-grad",
    "orchestrator.batch-size": f"--rollout-batch-size, which counts prompts; {_STEP}",
    "orchestrator.rollouts-per-example": "--n-samples-per-prompt",
    "orchestrator.sampling.max-tokens": "--rollout-max-response-len",
    "orchestrator.sampling.temperature": "--rollout-temperature",
    "wandb.project": "--wandb-project",
    "wandb.name": "--run-name",
}

_EARLIER_SLIME = {
    "update-weights-bucket-size": "--update-weight-buffer-size",
    "rollout-external": "--rollout-external-engine-addrs, which is enough",
    "use-slime-router": "--rollout-router builtin",
    "megatron-to-hf-mode": "weights are always sent as Hugging Face tensors: drop it",
    "train-memory-margin-bytes": "no memory is kept free for others: drop it",
    "enable-weights-backuper": "trainers keep their weights on the device: drop it",
    "disable-weights-backuper": "trainers keep their weights on the device: drop it",
    "use-dynamic-global-batch-size": "a step takes --global-batch-size rollouts of any number of samples: drop it",
    "qkv-format": "samples are packed into rows: drop it",
}

FOREIGN_FLAGS: dict[str, tuple[str, str]] = {
    **{name: ("other versions of slime", remedy) for name, remedy in _EARLIER_SLIME.items()},
    **{name: ("verl", remedy) for name, remedy in _VERL.items()},
    **{name: ("prime-rl", remedy) for name, remedy in _PRIME_RL.items()},
    **{name: ("OpenRLHF", remedy) for name, remedy in _OPENRLHF.items()},
    **{name: ("TRL", remedy) for name, remedy in _TRL.items()},
}
"""Foreign name, with dashes -> its library and the remedy here."""

_SETTING = re.compile(r"\+{0,2}(?P<name>[a-z][\w.]*\.\w+)=")
_FLAG = re.compile(r"--([a-z][a-z0-9-]*)")


def foreign_hint(name: str, shown: str | None = None) -> str | None:
    """Return the sentence for another library's flag, given without its leading dashes, or None."""
    key, shown = name.replace("_", "-"), shown or f"--{name}"
    if key not in FOREIGN_FLAGS:
        return None
    whose, remedy = FOREIGN_FLAGS[key]
    return f"{shown} is a name of {whose}: {'here it is ' if remedy.startswith('--') else ''}{remedy}"


def foreign_setting(word: str) -> str | None:
    """Return the sentence for a setting in verl's form, such as `data.train_files=x`, or None."""
    match = _SETTING.match(word)
    return None if match is None else foreign_hint(match["name"], shown=match["name"])


def with_keyword_names(sentence: str) -> str:
    """Replace the flags in a sentence by the keywords of `slime.run`."""
    return _FLAG.sub(lambda match: match[1].replace("-", "_"), sentence)


_DEEPGEMM = "it chooses kernels of the Megatron trainer, and the trainer is FSDP: drop the flag"

REFUSED: dict[str, str] = {
    "release-train": "trainers live as long as the run: --offload-train frees their memory instead",
    "opd-teacher-ckpt-step": "name the folder of that step with --opd-teacher-load",
    "load-forge-rollout-data": "replay with --load-debug-rollout-data, which starts no engines",
    "enable-mtp-training": "layers that predict several tokens at once are not trained, and their loss would change "
    "the others: drop the flag",
    "megatron-deepgemm-forward-layers": _DEEPGEMM,
    "megatron-deepgemm-forward-modules": _DEEPGEMM,
    "megatron-deepgemm-moe-forward-layers": _DEEPGEMM,
    "megatron-deepgemm-moe-forward-modules": _DEEPGEMM,
    "sglang-custom-pull-weights-pre-read-hook": "engines read weights without a hook: use "
    "--custom-update-weight-post-write-path on the side that writes them",
}
"""Name without leading dashes -> the reason, and what to do instead. Config fields and Megatron flags have precedence
over this table."""


def refusal(flag: str) -> str | None:
    """Return the sentence for a known slime flag that is not supported here, or None."""
    why = REFUSED.get(flag) or REFUSED_FIELDS.get(flag) or REFUSED_FIELDS.get(flag.removeprefix("no-"))
    return None if why is None else f"--{flag} is not supported: {why}"
