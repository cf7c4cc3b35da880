# Qwen2.5-0.5B
# Written by `slime models --scripts`; what it says stands in slime/models/published.json.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

model_args --swiglu --use-rotary-position-embeddings --group-query-attention --num-layers 24 --hidden-size 896 \
    --ffn-hidden-size 4864 --num-attention-heads 14 --num-query-groups 2 --kv-channels 64 --normalization RMSNorm \
    --norm-epsilon 1e-6 --disable-bias-linear --add-qkv-bias --vocab-size 151936 --rotary-base 1000000
