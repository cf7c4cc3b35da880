# Qwen3-8B
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_qwen3 --num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32 --num-query-groups 8 \
    --kv-channels 128 --vocab-size 151936 --rotary-base 1000000 --untie-embeddings-and-output-weights
