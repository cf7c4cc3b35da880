# Qwen2.5-1.5B. Qwen2.5-Math-1.5B and DeepSeek-R1-Distill-Qwen-1.5B: MODEL_ARGS_ROTARY_BASE=10000
# Written by `slime models --scripts`; what it says stands in slime/models/published.json.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

model_args --swiglu --use-rotary-position-embeddings --group-query-attention --num-layers 28 --hidden-size 1536 \
    --ffn-hidden-size 8960 --num-attention-heads 12 --num-query-groups 2 --kv-channels 128 --normalization RMSNorm \
    --norm-epsilon 1e-6 --disable-bias-linear --add-qkv-bias --vocab-size 151936 --rotary-base 1000000
