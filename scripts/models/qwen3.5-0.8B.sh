# Qwen3.5-0.8B
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_qwen3_hybrid --num-layers 24 --hidden-size 1024 --ffn-hidden-size 3584 --num-attention-heads 8 --num-query-groups 2 \
    --linear-num-key-heads 16 --linear-num-value-heads 16 --vocab-size 248320
