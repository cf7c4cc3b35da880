# Qwen3-30B-A3B. Qwen3-30B-A3B-Instruct-2507 and -Thinking-2507: MODEL_ARGS_ROTARY_BASE=10000000
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_qwen3_moe --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --num-query-groups 4 \
    --kv-channels 128 --vocab-size 151936 --rotary-base 1000000 \
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768
