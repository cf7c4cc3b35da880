# Qwen3-235B-A22B. Qwen3-235B-A22B-Instruct-2507 and -Thinking-2507: MODEL_ARGS_ROTARY_BASE=5000000
# Written by `slime models --scripts`; what it says stands in slime/models/published.json.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

model_args --swiglu --use-rotary-position-embeddings --group-query-attention --num-layers 94 --hidden-size 4096 \
    --ffn-hidden-size 12288 --num-attention-heads 64 --num-query-groups 4 --kv-channels 128 --normalization RMSNorm \
    --norm-epsilon 1e-6 --disable-bias-linear --qk-layernorm --vocab-size 151936 \
    --untie-embeddings-and-output-weights --rotary-base 1000000 --num-experts 128 --dense-layers 0 \
    --moe-ffn-hidden-size 1536 --moe-router-topk 8 --moe-router-score-function softmax \
    --moe-router-load-balancing-type none --moe-aux-loss-coeff 0 --moe-router-dtype fp32 --moe-grouped-gemm
