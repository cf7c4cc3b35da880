# Qwen3-30B-A3B. Qwen3-30B-A3B-Instruct-2507 and -Thinking-2507: MODEL_ARGS_ROTARY_BASE=10000000
# Written by `slime models --scripts`; what it says stands in slime/models/published.json.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

model_args --swiglu --use-rotary-position-embeddings --group-query-attention --num-layers 48 --hidden-size 2048 \
    --ffn-hidden-size 6144 --num-attention-heads 32 --num-query-groups 4 --kv-channels 128 --normalization RMSNorm \
    --norm-epsilon 1e-6 --disable-bias-linear --qk-layernorm --vocab-size 151936 \
    --untie-embeddings-and-output-weights --rotary-base 1000000 --num-experts 128 --dense-layers 0 \
    --moe-ffn-hidden-size 768 --moe-router-topk 8 --moe-router-score-function softmax \
    --moe-router-load-balancing-type none --moe-aux-loss-coeff 0 --moe-router-dtype fp32 --moe-grouped-gemm
