# GLM-4.5-Air
# Written by `slime models --scripts`; what it says stands in slime/models/published.json.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

model_args --swiglu --use-rotary-position-embeddings --group-query-attention --num-layers 46 --hidden-size 4096 \
    --ffn-hidden-size 10944 --num-attention-heads 96 --num-query-groups 8 --kv-channels 128 --normalization RMSNorm \
    --norm-epsilon 1e-5 --disable-bias-linear --add-qkv-bias --vocab-size 151552 \
    --untie-embeddings-and-output-weights --rotary-base 1000000 --rotary-percent 0.5 --num-experts 128 \
    --dense-layers 1 --moe-ffn-hidden-size 1408 --moe-router-topk 8 --moe-router-score-function sigmoid \
    --moe-router-load-balancing-type none --moe-aux-loss-coeff 0 --moe-router-dtype fp32 --moe-grouped-gemm \
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 0 --moe-shared-expert-intermediate-size 1408
