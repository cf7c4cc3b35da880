# Meta-Llama-3-8B
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_llama3 --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8 \
    --kv-channels 128 --vocab-size 128256 --rotary-base 500000 --untie-embeddings-and-output-weights
