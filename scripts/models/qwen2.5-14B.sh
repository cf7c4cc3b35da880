# Qwen2.5-14B. Qwen2.5-14B-Instruct: MODEL_ARGS_NORM_EPSILON=1e-6
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_qwen2 --num-layers 48 --hidden-size 5120 --ffn-hidden-size 13824 --num-attention-heads 40 --num-query-groups 8 \
    --vocab-size 152064 --rotary-base 1000000 --norm-epsilon 1e-5 --untie-embeddings-and-output-weights
