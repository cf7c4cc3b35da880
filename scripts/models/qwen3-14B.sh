# Qwen3-14B
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_qwen3 --num-layers 40 --hidden-size 5120 --ffn-hidden-size 17408 --num-attention-heads 40 --num-query-groups 8 \
    --kv-channels 128 --vocab-size 151936 --rotary-base 1000000 --untie-embeddings-and-output-weights
