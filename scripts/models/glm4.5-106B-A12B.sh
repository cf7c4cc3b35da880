# GLM-4.5-Air
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_glm4_moe --num-layers 46 --dense-layers 1 --hidden-size 4096 --ffn-hidden-size 10944 \
    --num-attention-heads 96 --num-query-groups 8 \
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 1408
