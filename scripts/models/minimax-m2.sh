# MiniMax-M2
# Written by `slime models --scripts`; what it says stands in slime/models/published.json.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

model_args --swiglu --use-rotary-position-embeddings --group-query-attention --num-layers 62 --hidden-size 3072 \
    --ffn-hidden-size 1536 --num-attention-heads 48 --num-query-groups 8 --kv-channels 128 --normalization RMSNorm \
    --norm-epsilon 1e-6 --disable-bias-linear --qk-layernorm --vocab-size 200064 \
    --untie-embeddings-and-output-weights --rotary-base 5000000 --rotary-percent 0.5 --num-experts 256 \
    --dense-layers 0 --moe-ffn-hidden-size 1536 --moe-router-topk 8 --moe-router-score-function sigmoid \
    --moe-router-load-balancing-type none --moe-aux-loss-coeff 0 --moe-router-dtype fp32 --moe-grouped-gemm \
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 0
