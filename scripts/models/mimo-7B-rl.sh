# MiMo-7B-RL
# Written by `slime models --scripts`; what it says stands in slime/models/published.json.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

model_args --swiglu --use-rotary-position-embeddings --group-query-attention --num-layers 36 --hidden-size 4096 \
    --ffn-hidden-size 11008 --num-attention-heads 32 --num-query-groups 8 --kv-channels 128 --normalization RMSNorm \
    --norm-epsilon 1e-5 --disable-bias-linear --add-qkv-bias --vocab-size 151680 \
    --untie-embeddings-and-output-weights --rotary-base 640000
