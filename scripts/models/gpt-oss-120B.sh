# gpt-oss-120b
# Written by `slime models --scripts`; what it says stands in slime/models/published.json.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

model_args --quick-geglu --position-embedding-type yarn --group-query-attention --num-layers 36 --hidden-size 2880 \
    --ffn-hidden-size 2880 --num-attention-heads 64 --num-query-groups 8 --kv-channels 64 --normalization RMSNorm \
    --norm-epsilon 1e-5 --add-qkv-bias --vocab-size 201088 --untie-embeddings-and-output-weights \
    --rotary-base 150000 --num-experts 128 --dense-layers 0 --moe-ffn-hidden-size 2880 --moe-router-topk 4 \
    --moe-router-score-function softmax --moe-router-load-balancing-type none --moe-aux-loss-coeff 0 \
    --moe-router-dtype fp32 --moe-grouped-gemm --softmax-type learnable --window-size 127,0 \
    --window-attn-skip-freq 2 --glu-linear-offset 1 --activation-func-clamp-value 7
