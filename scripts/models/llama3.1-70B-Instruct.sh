# Llama-3.1-70B, Llama-3.1-70B-Instruct and Llama-3.3-70B-Instruct
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_llama3 --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --num-query-groups 8 \
    --kv-channels 128 --vocab-size 128256 --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8 \
    --untie-embeddings-and-output-weights
