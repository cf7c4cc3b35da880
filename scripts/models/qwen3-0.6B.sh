# Qwen3-0.6B
# Written by `slime models --scripts`; what it says stands in slime/models/published.json.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

model_args --swiglu --use-rotary-position-embeddings --group-query-attention --num-layers 28 --hidden-size 1024 \
    --ffn-hidden-size 3072 --num-attention-heads 16 --num-query-groups 8 --kv-channels 128 --normalization RMSNorm \
    --norm-epsilon 1e-6 --disable-bias-linear --qk-layernorm --vocab-size 151936 --rotary-base 1000000
