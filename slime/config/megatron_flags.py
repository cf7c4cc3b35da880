"""Megatron-LM flags that existing slime scripts pass: read with their type and carried through under their name.

Each is of one of four classes, and none is ignored in silence. SHAPE: what the model is; the trainer takes that from
the Hugging Face config, and a flag that says another number is refused (`shape_flags`). NUMBERS: it changes what is
computed; only the values in `NEUTRAL`, with which it changes nothing here, are taken. SPEED: kernels and their
rounding, which cannot change what is learned: Megatron gets them; with FSDP plan and run name those that were given.
OTHERS: what slime does in its own way with both, such as files and logs; those that were given are named.
"""

from __future__ import annotations

from typing import Any

SWITCH, INT, FLOAT, NUMBER, TEXT, TEXTS = "switch", "int", "float", "number", "text", "texts"
SHAPE, NUMBERS, SPEED, OTHERS = "shape", "numbers", "speed", "others"

_TABLE: dict[tuple[str, str], str] = {
    (SHAPE, SWITCH): """
        group-query-attention qk-layernorm swiglu quick-geglu squared-relu add-qkv-bias disable-bias-linear
        untie-embeddings-and-output-weights apply-layernorm-1p attention-output-gate use-gated-attention
        multi-latent-attention post-self-attn-layernorm post-mlp-layernorm use-rotary-position-embeddings
        no-position-embedding use-rope-scaling rotary-interleaved moe-router-pre-softmax moe-router-enable-expert-bias
        moe-shared-expert-gate
        """,
    (SHAPE, INT): """
        num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups kv-channels vocab-size
        max-position-embeddings original-max-position-embeddings seq-length
        num-experts moe-ffn-hidden-size moe-shared-expert-intermediate-size moe-router-topk moe-router-num-groups
        moe-router-group-topk q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim
        window-attn-skip-freq
        linear-num-key-heads linear-num-value-heads linear-key-head-dim linear-value-head-dim linear-conv-kernel-dim
        dsa-indexer-n-heads dsa-indexer-head-dim dsa-indexer-topk
        """,
    (SHAPE, FLOAT): """
        norm-epsilon layernorm-epsilon rotary-percent rotary-scaling-factor rope-scaling-factor mscale mscale-all-dim
        beta-fast beta-slow moe-router-topk-scaling-factor glu-linear-offset activation-func-clamp-value
        """,
    (SHAPE, NUMBER): "rotary-base",
    (SHAPE, TEXT): """
        normalization position-embedding-type softmax-type window-size
        rope-type moe-layer-freq linear-attention-freq moe-router-score-function
        experimental-attention-variant
        """,
    (SHAPE, TEXTS): "spec",
    (NUMBERS, SWITCH): """
        fp16 fp8-param-gather moe-router-force-load-balancing moe-pad-expert-input-to-capacity finetune
        use-checkpoint-opt-param-scheduler
        """,
    (NUMBERS, FLOAT): """
        attention-dropout hidden-dropout moe-aux-loss-coeff moe-z-loss-coeff moe-router-bias-update-rate
        moe-expert-capacity-factor moe-input-jitter-eps
        """,
    (NUMBERS, NUMBER): "rotary-seq-len-interpolation-factor",
    (NUMBERS, TEXT): """
        fp8-format moe-router-load-balancing-type main-grads-dtype main-params-dtype
        """,
    (SPEED, SWITCH): """
        tp-comm-overlap no-rope-fusion moe-grouped-gemm
        moe-permute-fusion moe-router-fusion moe-shared-expert-overlap moe-enable-deepep moe-layer-recompute
        attention-softmax-in-fp32 no-gradient-accumulation-fusion no-masked-softmax-fusion no-bias-gelu-fusion
        no-bias-swiglu-fusion no-bias-dropout-fusion no-persist-layer-norm deterministic-mode
        overlap-moe-expert-parallel-comm delay-wgrad-compute
        """,
    (SPEED, INT): "moe-deepep-num-sms",
    (SPEED, TEXT): "moe-flex-dispatcher-backend moe-router-dtype",
    (SPEED, TEXTS): "cp-comm-type",
    (OTHERS, SWITCH): """
        overlap-cpu-optimizer-d2h-h2d use-precision-aware-optimizer moe-use-legacy-grouped-gemm
        moe-router-padding-for-fp8 moe-extended-tp use-tp-pp-dp-mapping
        accumulate-allreduce-grads-in-fp32 variable-seq-lengths bf16 no-check-for-nan-in-loss-and-grad
        cross-entropy-loss-fusion use-flash-attn use-cpu-initialization no-save-rng use-pytorch-profiler
        use-checkpoint-args auto-detect-ckpt-format ckpt-fully-parallel-load override-opt-param-scheduler
        no-create-attention-mask-in-dataloader log-throughput log-params-norm enable-experimental profile manual-gc
        ckpt-assume-constant-structure no-ckpt-fully-parallel-save log-timers-to-tensorboard log-memory-to-tensorboard
        """,
    (OTHERS, INT): """
        train-iters train-samples profile-step-start profile-step-end log-interval tensorboard-queue-size
        empty-unused-memory-level num-workers manual-gc-interval timing-log-level
        """,
    (OTHERS, FLOAT): """
        optimizer-offload-fraction init-method-std loss-scale initial-loss-scale min-loss-scale sgd-momentum
        """,
    (OTHERS, TEXT): """
        fp8-recipe fp8-amax-compute-algo moe-token-drop-policy ckpt-format cross-entropy-fusion-impl tokenizer-type
        tokenizer-model tensorboard-dir dist-ckpt-strictness
        """,
    (OTHERS, TEXTS): "profile-ranks",
}  # fmt: skip

MEGATRON_FLAGS: dict[str, str] = {name: kind for (_, kind), names in _TABLE.items() for name in names.split()}
"""Flag (without dashes in front) -> kind of value."""
MEGATRON_CLASSES: dict[str, str] = {name: role for (role, _), names in _TABLE.items() for name in names.split()}
"""Flag -> SHAPE, NUMBERS, SPEED or OTHERS."""

_HALF = "training computes in float32 or bfloat16, --dtype chooses: drop it"
_STATE = "gradients and master weights are float32: give fp32, or drop it"
_ROUTER = "experts are trained by the loss alone: give 0, or drop it"
_TOKENS = "no token of an expert is dropped: drop it"

NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "attention-dropout": ((0,), "there is no dropout in training: give 0, or drop it"),
    "hidden-dropout": ((0,), "there is no dropout in training: give 0, or drop it"),
    "moe-aux-loss-coeff": ((0,), _ROUTER),
    "moe-z-loss-coeff": ((0,), _ROUTER),
    "moe-router-bias-update-rate": ((0,), "the biases of experts stay as they are: give 0, or drop it"),
    "moe-router-load-balancing-type": (
        ("none", "aux_loss", "seq_aux_loss", "global_aux_loss"),
        "tokens go to the experts that score best: give none, or drop it",
    ),
    "moe-router-force-load-balancing": ((), "tokens go to the experts that score best: drop it"),
    "moe-expert-capacity-factor": ((), _TOKENS),
    "moe-pad-expert-input-to-capacity": ((), _TOKENS),
    "moe-input-jitter-eps": ((0,), "routers see their inputs without noise: give 0, or drop it"),
    "rotary-seq-len-interpolation-factor": (
        (1,),
        "positions are what the model's config.json says: write its rope scaling there, and drop it",
    ),
    "fp16": ((), _HALF),
    "fp8-format": ((), _HALF),
    "fp8-param-gather": ((), _HALF),
    "main-grads-dtype": (("fp32",), _STATE),
    "main-params-dtype": (("fp32",), _STATE),
    "use-checkpoint-opt-param-scheduler": ((), "learning rate and weight decay are those of the flags: drop it"),
    "finetune": (
        (),
        "--load goes on with a run; to start anew from its weights name its folder with --ref-load instead",
    ),
}
"""Of each flag that changes numbers: the values that change nothing here, and why others are refused. `finetune` is
taken where there is no checkpoint to go on from."""

_MOMENTS = "moments are float32 on the device of the weights: drop it, or use --train-backend fsdp"

REFUSED_BY_MEGATRON: dict[str, str] = {
    "use-precision-aware-optimizer": _MOMENTS,
    "overlap-cpu-optimizer-d2h-h2d": _MOMENTS,
    "optimizer-offload-fraction": _MOMENTS,
    "moe-use-legacy-grouped-gemm": "megatron-core 0.16 is about to drop it: drop the flag",
    "moe-router-padding-for-fp8": _HALF,
    "moe-extended-tp": "megatron-core has it no more: give --expert-tensor-parallel-size",
    "use-tp-pp-dp-mapping": "processes are numbered by tensor, context, data and pipeline, in this order: drop it",
}
"""Flags that FSDP has no use for and Megatron cannot go by."""

DONE_BY_MEGATRON = ("bf16", "accumulate-allreduce-grads-in-fp32", "variable-seq-lengths")
"""What is so anyway, or asked for elsewhere: nothing needs to be said about it."""
