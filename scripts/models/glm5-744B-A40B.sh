# GLM-5
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_glm_dsa --num-layers 78 --dense-layers 3 --hidden-size 6144 --ffn-hidden-size 12288 \
    --num-attention-heads 64 --kv-channels 192 --q-lora-rank 2048 --qk-head-dim 192 --v-head-dim 256 \
    --vocab-size 154880 --rotary-base 1000000 \
    --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 \
    --moe-router-topk-scaling-factor 2.5
