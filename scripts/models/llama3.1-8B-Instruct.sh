# Llama-3.1-8B and Llama-3.1-8B-Instruct
# Written by `slime models --scripts`; what it says stands in slime/models/published.json.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

model_args --swiglu --use-rotary-position-embeddings --group-query-attention --num-layers 32 --hidden-size 4096 \
    --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8 --kv-channels 128 --normalization RMSNorm \
    --norm-epsilon 1e-5 --disable-bias-linear --vocab-size 128256 --untie-embeddings-and-output-weights \
    --rotary-base 500000 --use-rope-scaling
