# Llama-3.1-8B and Llama-3.1-8B-Instruct
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_llama3 --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8 \
    --kv-channels 128 --vocab-size 128256 --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8 \
    --untie-embeddings-and-output-weights
