# Qwen2.5-3B
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_qwen2 --num-layers 36 --hidden-size 2048 --ffn-hidden-size 11008 --num-attention-heads 16 --num-query-groups 2 \
    --vocab-size 151936 --rotary-base 1000000 --norm-epsilon 1e-6
