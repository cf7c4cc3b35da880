# Qwen2.5-1.5B. Qwen2.5-Math-1.5B and DeepSeek-R1-Distill-Qwen-1.5B: MODEL_ARGS_ROTARY_BASE=10000
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_qwen2 --num-layers 28 --hidden-size 1536 --ffn-hidden-size 8960 --num-attention-heads 12 --num-query-groups 2 \
    --vocab-size 151936 --rotary-base 1000000 --norm-epsilon 1e-6
