# Moonlight-16B-A3B
# Written by `slime models --scripts`; what it says stands in slime/models/published.json.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

model_args --swiglu --position-embedding-type rope --num-layers 27 --hidden-size 2048 --ffn-hidden-size 11264 \
    --num-attention-heads 16 --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear --qk-layernorm \
    --vocab-size 163840 --untie-embeddings-and-output-weights --rotary-base 50000 --multi-latent-attention \
    --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --rope-type rope --num-experts 64 \
    --dense-layers 1 --moe-ffn-hidden-size 1408 --moe-router-topk 6 --moe-router-score-function sigmoid \
    --moe-router-load-balancing-type none --moe-aux-loss-coeff 0 --moe-router-dtype fp32 --moe-grouped-gemm \
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 0 --moe-router-topk-scaling-factor 2.446 \
    --moe-shared-expert-intermediate-size 2816
