# DeepSeek-R1: the shape of DeepSeek-V3
# Written by `slime models --scripts`; what it says stands in slime/models/published.json.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

model_args --swiglu --position-embedding-type rope --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 \
    --num-attention-heads 128 --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear --qk-layernorm \
    --vocab-size 129280 --untie-embeddings-and-output-weights --rotary-base 10000 --multi-latent-attention \
    --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 \
    --rotary-scaling-factor 40 --mscale 1 --mscale-all-dim 1 --num-experts 256 --dense-layers 3 \
    --moe-ffn-hidden-size 2048 --moe-router-topk 8 --moe-router-score-function sigmoid \
    --moe-router-load-balancing-type none --moe-aux-loss-coeff 0 --moe-router-dtype fp32 --moe-grouped-gemm \
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 0 --moe-router-topk-scaling-factor 2.5 \
    --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-shared-expert-intermediate-size 2048
