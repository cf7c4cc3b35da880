# Qwen3.5-0.8B
# Written by `slime models --scripts`; what it says stands in slime/models/published.json.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

model_args --swiglu --use-rotary-position-embeddings --group-query-attention --num-layers 24 --hidden-size 1024 \
    --ffn-hidden-size 3584 --num-attention-heads 8 --num-query-groups 2 --kv-channels 256 --normalization RMSNorm \
    --norm-epsilon 1e-6 --disable-bias-linear --qk-layernorm --vocab-size 248320 --rotary-base 10000000 \
    --rotary-percent 0.25 --apply-layernorm-1p --attention-output-gate \
    --experimental-attention-variant gated_delta_net --linear-attention-freq 4 --linear-conv-kernel-dim 4 \
    --linear-key-head-dim 128 --linear-value-head-dim 128 --linear-num-key-heads 16 --linear-num-value-heads 16
