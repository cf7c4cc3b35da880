"""Flags that slime has elsewhere and this version does not: refused by name, so that nobody believes they work."""

from __future__ import annotations

_NAMES = """
    train-backend offload offload-train no-offload-train distributed-backend qwen-gdn-backend train-env-vars
    release-train custom-model-provider-path recompute-loss-function freeze-indexer allgather-cp model-name
    rollout-data-transport multimodal-keys log-probs-max-tokens-per-gpu eval-max-context-len
    ref-ckpt-step async-save use-stateless-adam use-routing-replay use-rollout-routing-replay opd-teacher-ckpt-step
    wandb-always-use-train-step load-forge-rollout-data memory-snapshot-dir memory-snapshot-num-steps profile-target
    memory-recorder record-memory-history http-proxy use-distributed-post rollout-buffer-url
    fetch-trajectory-retry-times min-batch-collection-ratio rollout-task-type data-pad-size-multiplier
    mtp-num-layers mtp-loss-scaling-factor enable-mtp-training ci-disable-kl-checker
    ci-train-rollout-logprob-abs-diff-threshold ci-save-grad-norm ci-load-grad-norm custom-megatron-init-path
    custom-megatron-before-log-prob-hook-path custom-megatron-before-train-step-hook-path
    megatron-deepgemm-forward-layers megatron-deepgemm-forward-modules megatron-deepgemm-moe-forward-layers
    megatron-deepgemm-moe-forward-modules padded-vocab-size sglang-custom-pull-weights-pre-read-hook
"""

NOT_YET: frozenset[str] = frozenset(_NAMES.split())
"""Without the dashes in front. Whatever is a field of the config or a Megatron flag is looked up before this."""

REFUSED: dict[str, str] = {
    "wandb-key": "put the key into the environment variable WANDB_API_KEY, where no saved config shows it",
    "num-gpus-per-node": "a run has one machine and its GPUs are counted, drop the flag",
    "disable-wandb-random-suffix": "W&B names never get a random suffix here, drop the flag",
}
"""Flags that will not come, and what to do instead."""


def refusal(flag: str) -> str | None:
    """The sentence for a known slime flag that cannot be used here, or None."""
    if flag in REFUSED:
        return f"--{flag} is not taken: {REFUSED[flag]}"
    if flag in NOT_YET:
        return f"--{flag} is a slime flag that this version does not have yet"
    return None
