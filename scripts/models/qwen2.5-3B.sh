# Qwen2.5-3B
# Written by `slime models --scripts`; what it says stands in slime/models/published.json.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

model_args --swiglu --use-rotary-position-embeddings --group-query-attention --num-layers 36 --hidden-size 2048 \
    --ffn-hidden-size 11008 --num-attention-heads 16 --num-query-groups 2 --kv-channels 128 --normalization RMSNorm \
    --norm-epsilon 1e-6 --disable-bias-linear --add-qkv-bias --vocab-size 151936 --rotary-base 1000000
