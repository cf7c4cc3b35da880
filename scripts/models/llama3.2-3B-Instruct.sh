# Llama-3.2-3B and Llama-3.2-3B-Instruct
# Written by `slime models --scripts`; what it says stands in slime/models/published.json.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

model_args --swiglu --use-rotary-position-embeddings --group-query-attention --num-layers 28 --hidden-size 3072 \
    --ffn-hidden-size 8192 --num-attention-heads 24 --num-query-groups 8 --kv-channels 128 --normalization RMSNorm \
    --norm-epsilon 1e-5 --disable-bias-linear --vocab-size 128256 --rotary-base 500000 --use-rope-scaling \
    --rope-scaling-factor 32
