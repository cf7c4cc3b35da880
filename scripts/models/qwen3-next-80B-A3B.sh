# Qwen3-Next-80B-A3B
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_qwen3_hybrid_moe --num-layers 48 --hidden-size 2048 --ffn-hidden-size 5120 \
    --num-attention-heads 16 --num-query-groups 2 --linear-num-key-heads 16 --linear-num-value-heads 32 --vocab-size 151936 \
    --num-experts 512 --moe-router-topk 10 --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 512
