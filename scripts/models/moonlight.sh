# Moonlight-16B-A3B
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_deepseek_v3 --num-layers 27 --dense-layers 1 --hidden-size 2048 --ffn-hidden-size 11264 \
    --num-attention-heads 16 --kv-channels 128 --qk-head-dim 128 --v-head-dim 128 \
    --vocab-size 163840 --rotary-base 50000 --rotary-scaling-factor 1 --norm-epsilon 1e-5 \
    --num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 2816 \
    --moe-router-num-groups 1 --moe-router-group-topk 1 --moe-router-topk-scaling-factor 2.446
