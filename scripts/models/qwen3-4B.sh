# Qwen3-4B and Qwen3-4B-Base
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_qwen3 --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 --num-query-groups 8 \
    --kv-channels 128 --vocab-size 151936 --rotary-base 1000000
