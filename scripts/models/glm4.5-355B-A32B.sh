# GLM-4.5
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_glm4_moe --num-layers 92 --dense-layers 3 --hidden-size 5120 --ffn-hidden-size 12288 \
    --num-attention-heads 96 --num-query-groups 8 --qk-layernorm \
    --num-experts 160 --moe-router-topk 8 --moe-ffn-hidden-size 1536 --moe-shared-expert-intermediate-size 1536 \
    --moe-router-topk-scaling-factor 2.5
