# Qwen3-4B-Instruct-2507 and Qwen3-4B-Thinking-2507: Qwen3-4B for longer contexts
# Written by `slime models --scripts`; what it says stands in slime/models/published.json.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

model_args --swiglu --use-rotary-position-embeddings --group-query-attention --num-layers 36 --hidden-size 2560 \
    --ffn-hidden-size 9728 --num-attention-heads 32 --num-query-groups 8 --kv-channels 128 --normalization RMSNorm \
    --norm-epsilon 1e-6 --disable-bias-linear --qk-layernorm --vocab-size 151936 --rotary-base 5000000
