# Qwen3-0.6B
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_qwen3 --num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072 --num-attention-heads 16 --num-query-groups 8 \
    --kv-channels 128 --vocab-size 151936 --rotary-base 1000000
