"""Flags that slime has elsewhere and this version does not: refused by name with the reason, so that nobody believes
they work."""

from __future__ import annotations

_TRAINERS_STAY = "the trainers keep their memory while engines generate; --offload-rollout frees that of the engines"
_MEMORY = "memory is not recorded: run the trainers under torch.cuda.memory's own tools, and drop the flag"
_BUFFER = "there is no rollout buffer server: prompts and samples are kept in the run's own journal, drop the flag"
_MEGATRON_HOOK = "it is called inside Megatron, and the trainer is FSDP: drop the flag"
_DEEPGEMM = "it chooses kernels of the Megatron trainer, and the trainer is FSDP: drop the flag"
_ROUTING = "the experts that a router chose are not recorded, so they cannot be replayed: drop the flag"
_MTP = "layers that predict several tokens are not trained: drop the flag"

REFUSED: dict[str, str] = {
    "train-backend": "the trainer is FSDP: drop the flag",
    "offload": _TRAINERS_STAY,
    "offload-train": _TRAINERS_STAY,
    "no-offload-train": _TRAINERS_STAY,
    "release-train": "trainers live as long as the run: --offload-rollout frees the engines' memory instead",
    "distributed-backend": "it follows from the device, nccl on GPUs and gloo on a CPU: drop the flag",
    "num-gpus-per-node": "a run has one machine and its GPUs are counted, drop the flag",
    "qwen-gdn-backend": "attention kernels are chosen by the trainer: drop the flag",
    "train-env-vars": "set the variables for the whole run, trainers inherit its environment",
    "custom-model-provider-path": "models are built by transformers from the model folder: put the code into the "
    "folder and give --trust-remote-code",
    "recompute-loss-function": "the loss keeps its activations: --log-probs-chunk-size bounds their memory",
    "freeze-indexer": "name the indexer's parameters with --freeze-params-name-list",
    "allgather-cp": "sequences are not cut over several processes: drop the flag",
    "model-name": "the family is read from the model folder: drop the flag",
    "rollout-data-transport": "samples go to the trainers over their own channels: drop the flag",
    "multimodal-keys": "images and videos are not in this version, prompts are text",
    "log-probs-max-tokens-per-gpu": "the log-prob pass takes the micro-batches of training, of --max-tokens-per-gpu",
    "eval-max-context-len": "give --eval-max-response-len and --eval-max-prompt-len",
    "opd-teacher-ckpt-step": "name the folder of that step with --opd-teacher-load",
    "async-save": "checkpoints are written while the trainers wait: drop the flag",
    "use-stateless-adam": "Adam keeps its moments: --reset-optimizer-states forgets them before each rollout",
    "use-routing-replay": _ROUTING,
    "use-rollout-routing-replay": _ROUTING,
    "load-forge-rollout-data": "replay with --load-debug-rollout-data, which starts no engines",
    "memory-snapshot-dir": _MEMORY,
    "memory-snapshot-num-steps": _MEMORY,
    "memory-recorder": _MEMORY,
    "record-memory-history": _MEMORY,
    "profile-target": "training is not profiled: the perf/ metrics say where time goes, drop the flag",
    "http-proxy": "requests go to the engines directly: drop the flag",
    "use-distributed-post": "one event loop sends all requests: drop the flag",
    "rollout-buffer-url": _BUFFER,
    "fetch-trajectory-retry-times": _BUFFER,
    "min-batch-collection-ratio": _BUFFER,
    "rollout-task-type": _BUFFER,
    "data-pad-size-multiplier": "rows are not padded: drop the flag",
    "mtp-num-layers": _MTP,
    "mtp-loss-scaling-factor": _MTP,
    "enable-mtp-training": _MTP,
    "ci-disable-kl-checker": "--ci-test always compares the log-probs: drop one of the two",
    "ci-train-rollout-logprob-abs-diff-threshold": "--ci-test has a threshold of its own: drop the flag",
    "ci-save-grad-norm": "gradient norms are in metrics.jsonl as train/grad_norm: drop the flag",
    "ci-load-grad-norm": "gradient norms are in metrics.jsonl as train/grad_norm: drop the flag",
    "custom-megatron-init-path": _MEGATRON_HOOK,
    "custom-megatron-before-log-prob-hook-path": _MEGATRON_HOOK,
    "custom-megatron-before-train-step-hook-path": _MEGATRON_HOOK,
    "megatron-deepgemm-forward-layers": _DEEPGEMM,
    "megatron-deepgemm-forward-modules": _DEEPGEMM,
    "megatron-deepgemm-moe-forward-layers": _DEEPGEMM,
    "megatron-deepgemm-moe-forward-modules": _DEEPGEMM,
    "padded-vocab-size": "the vocabulary is that of the model folder, without padding: drop the flag",
    "sglang-custom-pull-weights-pre-read-hook": "engines read weights without a hook: use "
    "--custom-update-weight-post-write-path on the side that writes them",
}
"""Name without the dashes in front -> why, and what to do instead. Whatever is a field of the config or a Megatron flag
is looked up before this."""


def refusal(flag: str) -> str | None:
    """The sentence for a known slime flag that cannot be used here, or None."""
    return f"--{flag} is not taken: {REFUSED[flag]}" if flag in REFUSED else None
