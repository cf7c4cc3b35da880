# GLM-4-9B-0414
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_glm4 --num-layers 40 --hidden-size 4096 --ffn-hidden-size 13696 --num-attention-heads 32 --num-query-groups 2 \
    --add-qkv-bias
