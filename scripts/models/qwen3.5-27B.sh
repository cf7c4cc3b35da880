# Qwen3.5-27B and Qwen3.6-27B
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_qwen3_hybrid --num-layers 64 --hidden-size 5120 --ffn-hidden-size 17408 --num-attention-heads 24 --num-query-groups 4 \
    --linear-num-key-heads 16 --linear-num-value-heads 48 --vocab-size 248320 --untie-embeddings-and-output-weights
