# Qwen3-Next-80B-A3B
# Written by `slime models --scripts`; what it says stands in slime/models/published.json.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

model_args --swiglu --use-rotary-position-embeddings --group-query-attention --num-layers 48 --hidden-size 2048 \
    --ffn-hidden-size 5120 --num-attention-heads 16 --num-query-groups 2 --kv-channels 256 --normalization RMSNorm \
    --norm-epsilon 1e-6 --disable-bias-linear --qk-layernorm --vocab-size 151936 \
    --untie-embeddings-and-output-weights --rotary-base 10000000 --rotary-percent 0.25 --apply-layernorm-1p \
    --attention-output-gate --experimental-attention-variant gated_delta_net --linear-attention-freq 4 \
    --linear-conv-kernel-dim 4 --linear-key-head-dim 128 --linear-value-head-dim 128 --linear-num-key-heads 16 \
    --linear-num-value-heads 32 --num-experts 512 --dense-layers 0 --moe-ffn-hidden-size 512 --moe-router-topk 10 \
    --moe-router-score-function softmax --moe-router-load-balancing-type none --moe-aux-loss-coeff 0 \
    --moe-router-dtype fp32 --moe-grouped-gemm --moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate
