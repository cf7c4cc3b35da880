# Llama-3.1-70B, Llama-3.1-70B-Instruct and Llama-3.3-70B-Instruct
# Written by `slime models --scripts`; what it says stands in slime/models/published.json.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

model_args --swiglu --use-rotary-position-embeddings --group-query-attention --num-layers 80 --hidden-size 8192 \
    --ffn-hidden-size 28672 --num-attention-heads 64 --num-query-groups 8 --kv-channels 128 --normalization RMSNorm \
    --norm-epsilon 1e-5 --disable-bias-linear --vocab-size 128256 --untie-embeddings-and-output-weights \
    --rotary-base 500000 --use-rope-scaling
