"""Megatron-LM flags that existing slime scripts pass: read with their type and carried through under their name.

The FSDP trainer takes the model's shape from the Hugging Face config; the shape flags are only compared with it.
"""

from __future__ import annotations

SWITCH, INT, FLOAT, NUMBER, TEXT, TEXTS = "switch", "int", "float", "number", "text", "texts"


def _kind(kind: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), kind)


MEGATRON_FLAGS: dict[str, str] = {
    **_kind(
        SWITCH,
        """
        sequence-parallel use-distributed-optimizer overlap-grad-reduce overlap-param-gather tp-comm-overlap
        overlap-cpu-optimizer-d2h-h2d use-precision-aware-optimizer optimizer-cpu-offload
        group-query-attention qk-layernorm swiglu squared-relu add-qkv-bias disable-bias-linear
        untie-embeddings-and-output-weights apply-layernorm-1p attention-output-gate multi-latent-attention
        post-self-attn-layernorm post-mlp-layernorm
        use-rotary-position-embeddings no-position-embedding use-rope-scaling no-rope-fusion rotary-interleaved
        moe-grouped-gemm moe-permute-fusion moe-router-pre-softmax moe-router-enable-expert-bias moe-router-fusion
        moe-shared-expert-overlap moe-shared-expert-gate moe-enable-deepep moe-use-legacy-grouped-gemm
        moe-layer-recompute moe-router-force-load-balancing moe-pad-expert-input-to-capacity
        moe-router-padding-for-fp8 moe-extended-tp
        accumulate-allreduce-grads-in-fp32 attention-softmax-in-fp32 no-gradient-accumulation-fusion
        no-check-for-nan-in-loss-and-grad no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion
        no-bias-dropout-fusion no-persist-layer-norm cross-entropy-loss-fusion use-flash-attn
        bf16 fp16 fp8-param-gather use-cpu-initialization no-load-optim no-load-rng no-save-rng finetune
        use-pytorch-profiler use-checkpoint-args auto-detect-ckpt-format ckpt-fully-parallel-load
        log-throughput log-params-norm deterministic-mode use-tp-pp-dp-mapping distribute-saved-activations
        variable-seq-lengths enable-experimental
        """,
    ),
    **_kind(
        INT,
        """
        tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size expert-model-parallel-size
        expert-tensor-parallel-size num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank
        decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers
        microbatch-group-size-per-virtual-pipeline-stage
        num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups kv-channels vocab-size
        make-vocab-size-divisible-by max-position-embeddings original-max-position-embeddings seq-length
        num-experts moe-ffn-hidden-size moe-shared-expert-intermediate-size moe-router-topk moe-router-num-groups
        moe-router-group-topk moe-deepep-num-sms
        q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim
        linear-num-key-heads linear-num-value-heads linear-key-head-dim linear-value-head-dim
        linear-conv-kernel-dim dsa-indexer-n-heads dsa-indexer-head-dim dsa-indexer-topk
        recompute-num-layers train-iters train-samples
        profile-step-start profile-step-end log-interval tensorboard-queue-size empty-unused-memory-level
        num-workers manual-gc-interval
        """,
    ),
    **_kind(
        FLOAT,
        """
        attention-dropout hidden-dropout norm-epsilon layernorm-epsilon init-method-std rotary-percent
        rotary-scaling-factor rope-scaling-factor mscale mscale-all-dim beta-fast beta-slow
        moe-aux-loss-coeff moe-z-loss-coeff moe-router-topk-scaling-factor moe-router-bias-update-rate
        moe-expert-capacity-factor moe-input-jitter-eps optimizer-offload-fraction
        loss-scale initial-loss-scale min-loss-scale sgd-momentum
        """,
    ),
    **_kind(NUMBER, "rotary-base rotary-seq-len-interpolation-factor"),
    **_kind(
        TEXT,
        """
        normalization position-embedding-type attention-backend transformer-impl rope-type
        recompute-granularity recompute-method fp8-format fp8-recipe fp8-amax-compute-algo
        moe-layer-freq linear-attention-freq moe-token-dispatcher-type moe-router-load-balancing-type
        moe-router-score-function moe-router-dtype moe-token-drop-policy
        main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype
        ckpt-format tokenizer-type tokenizer-model tensorboard-dir dist-ckpt-strictness
        pipeline-model-parallel-layout experimental-attention-variant
        """,
    ),
    **_kind(TEXTS, "spec recompute-modules profile-ranks cp-comm-type"),
}
"""Flag (without dashes in front) -> kind of value."""
