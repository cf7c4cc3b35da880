# Qwen2.5-14B. Qwen2.5-14B-Instruct: MODEL_ARGS_NORM_EPSILON=1e-6
# Written by `slime models --scripts`; what it says stands in slime/models/published.json.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

model_args --swiglu --use-rotary-position-embeddings --group-query-attention --num-layers 48 --hidden-size 5120 \
    --ffn-hidden-size 13824 --num-attention-heads 40 --num-query-groups 8 --kv-channels 128 --normalization RMSNorm \
    --norm-epsilon 1e-5 --disable-bias-linear --add-qkv-bias --vocab-size 152064 \
    --untie-embeddings-and-output-weights --rotary-base 1000000
