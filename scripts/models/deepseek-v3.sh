# DeepSeek-V3
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_deepseek_v3 --num-layers 61 --dense-layers 3 --hidden-size 7168 --ffn-hidden-size 18432 \
    --num-attention-heads 128 --kv-channels 128 --q-lora-rank 1536 --qk-head-dim 128 --v-head-dim 128 \
    --vocab-size 129280 --rotary-base 10000 --rotary-scaling-factor 40 --mscale 1 --mscale-all-dim 1 --norm-epsilon 1e-6 \
    --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 \
    --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5
