# GLM-4.7: the shape of GLM-4.5
# Written by `slime models --scripts`; what it says stands in slime/models/published.json.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

model_args --swiglu --use-rotary-position-embeddings --group-query-attention --num-layers 92 --hidden-size 5120 \
    --ffn-hidden-size 12288 --num-attention-heads 96 --num-query-groups 8 --kv-channels 128 --normalization RMSNorm \
    --norm-epsilon 1e-5 --disable-bias-linear --add-qkv-bias --qk-layernorm --vocab-size 151552 \
    --untie-embeddings-and-output-weights --rotary-base 1000000 --rotary-percent 0.5 --num-experts 160 \
    --dense-layers 3 --moe-ffn-hidden-size 1536 --moe-router-topk 8 --moe-router-score-function sigmoid \
    --moe-router-load-balancing-type none --moe-aux-loss-coeff 0 --moe-router-dtype fp32 --moe-grouped-gemm \
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 0 --moe-router-topk-scaling-factor 2.5 \
    --moe-shared-expert-intermediate-size 1536
