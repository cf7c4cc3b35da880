# Kimi-K2-Base and Kimi-K2-Instruct
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_deepseek_v3 --num-layers 61 --dense-layers 1 --hidden-size 7168 --ffn-hidden-size 18432 \
    --num-attention-heads 64 --kv-channels 64 --q-lora-rank 1536 --qk-head-dim 128 --v-head-dim 128 \
    --vocab-size 163840 --rotary-base 50000 --rotary-scaling-factor 32 --mscale 1 --mscale-all-dim 1 --norm-epsilon 1e-6 \
    --num-experts 384 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 \
    --moe-router-num-groups 1 --moe-router-group-topk 1 --moe-router-topk-scaling-factor 2.827
