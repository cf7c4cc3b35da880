# Qwen3-1.7B
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_qwen3 --num-layers 28 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 16 --num-query-groups 8 \
    --kv-channels 128 --vocab-size 151936 --rotary-base 1000000
