# GLM-4-32B-0414 and GLM-Z1-32B-0414
# Written by `slime models --scripts`; what it says stands in slime/models/published.json.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

model_args --swiglu --use-rotary-position-embeddings --group-query-attention --num-layers 61 --hidden-size 6144 \
    --ffn-hidden-size 23040 --num-attention-heads 48 --num-query-groups 2 --kv-channels 128 --normalization RMSNorm \
    --norm-epsilon 1e-5 --disable-bias-linear --vocab-size 151552 --untie-embeddings-and-output-weights \
    --rotary-base 10000 --rotary-percent 0.5 --rotary-interleaved --post-self-attn-layernorm --post-mlp-layernorm
