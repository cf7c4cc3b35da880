# Qwen2.5-7B
# Written by `slime models --scripts`; what it says stands in slime/models/published.json.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

model_args --swiglu --use-rotary-position-embeddings --group-query-attention --num-layers 28 --hidden-size 3584 \
    --ffn-hidden-size 18944 --num-attention-heads 28 --num-query-groups 4 --kv-channels 128 --normalization RMSNorm \
    --norm-epsilon 1e-6 --disable-bias-linear --add-qkv-bias --vocab-size 152064 \
    --untie-embeddings-and-output-weights --rotary-base 1000000
