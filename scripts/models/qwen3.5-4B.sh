# Qwen3.5-4B
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_qwen3_hybrid --num-layers 32 --hidden-size 2560 --ffn-hidden-size 9216 --num-attention-heads 16 --num-query-groups 4 \
    --linear-num-key-heads 16 --linear-num-value-heads 32 --vocab-size 248320
