# Qwen3.5-9B
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_qwen3_hybrid --num-layers 32 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 16 --num-query-groups 4 \
    --linear-num-key-heads 16 --linear-num-value-heads 32 --vocab-size 248320 --untie-embeddings-and-output-weights
