# GLM-4.7-Flash
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_deepseek_v3 --num-layers 47 --dense-layers 1 --hidden-size 2048 --ffn-hidden-size 10240 \
    --num-attention-heads 20 --kv-channels 192 --q-lora-rank 768 --qk-head-dim 192 --v-head-dim 256 \
    --vocab-size 154880 --rotary-base 1000000 --norm-epsilon 1e-5 \
    --num-experts 64 --moe-router-topk 4 --moe-ffn-hidden-size 1536 --moe-shared-expert-intermediate-size 1536 \
    --moe-router-topk-scaling-factor 1.8
