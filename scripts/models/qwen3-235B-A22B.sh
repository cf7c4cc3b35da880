# Qwen3-235B-A22B. Qwen3-235B-A22B-Instruct-2507 and -Thinking-2507: MODEL_ARGS_ROTARY_BASE=5000000
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_qwen3_moe --num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 64 --num-query-groups 4 \
    --kv-channels 128 --vocab-size 151936 --rotary-base 1000000 \
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 1536
