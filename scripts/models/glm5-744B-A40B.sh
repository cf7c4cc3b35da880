# GLM-5
# Written by `slime models --scripts`; what it says stands in slime/models/published.json.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

model_args --swiglu --position-embedding-type rope --num-layers 78 --hidden-size 6144 --ffn-hidden-size 12288 \
    --num-attention-heads 64 --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear --qk-layernorm \
    --vocab-size 154880 --untie-embeddings-and-output-weights --rotary-base 1000000 --multi-latent-attention \
    --q-lora-rank 2048 --kv-lora-rank 512 --qk-head-dim 192 --qk-pos-emb-head-dim 64 --v-head-dim 256 \
    --rope-type rope --num-experts 256 --dense-layers 3 --moe-ffn-hidden-size 2048 --moe-router-topk 8 \
    --moe-router-score-function sigmoid --moe-router-load-balancing-type none --moe-aux-loss-coeff 0 \
    --moe-router-dtype fp32 --moe-grouped-gemm --moe-router-enable-expert-bias --moe-router-bias-update-rate 0 \
    --moe-router-topk-scaling-factor 2.5 --moe-shared-expert-intermediate-size 2048 \
    --experimental-attention-variant dsa --dsa-indexer-n-heads 32 --dsa-indexer-head-dim 128 --dsa-indexer-topk 2048
