# Qwen3.5-35B-A3B and Qwen3.6-35B-A3B
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_qwen3_hybrid_moe --num-layers 40 --hidden-size 2048 --ffn-hidden-size 512 \
    --num-attention-heads 16 --num-query-groups 2 --linear-num-key-heads 16 --linear-num-value-heads 32 --vocab-size 248320 \
    --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 512
