# Qwen2.5-0.5B
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_qwen2 --num-layers 24 --hidden-size 896 --ffn-hidden-size 4864 --num-attention-heads 14 --num-query-groups 2 \
    --vocab-size 151936 --rotary-base 1000000 --norm-epsilon 1e-6
