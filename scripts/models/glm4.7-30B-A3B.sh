# GLM-4.7-Flash
# Written by `slime models --scripts`; what it says stands in slime/models/published.json.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

model_args --swiglu --position-embedding-type rope --num-layers 47 --hidden-size 2048 --ffn-hidden-size 10240 \
    --num-attention-heads 20 --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear --qk-layernorm \
    --vocab-size 154880 --untie-embeddings-and-output-weights --rotary-base 1000000 --multi-latent-attention \
    --q-lora-rank 768 --kv-lora-rank 512 --qk-head-dim 192 --qk-pos-emb-head-dim 64 --v-head-dim 256 \
    --rope-type rope --num-experts 64 --dense-layers 1 --moe-ffn-hidden-size 1536 --moe-router-topk 4 \
    --moe-router-score-function sigmoid --moe-router-load-balancing-type none --moe-aux-loss-coeff 0 \
    --moe-router-dtype fp32 --moe-grouped-gemm --moe-router-enable-expert-bias --moe-router-bias-update-rate 0 \
    --moe-router-topk-scaling-factor 1.8 --moe-shared-expert-intermediate-size 1536
