# Qwen2.5-7B
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_qwen2 --num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28 --num-query-groups 4 \
    --vocab-size 152064 --rotary-base 1000000 --norm-epsilon 1e-6 --untie-embeddings-and-output-weights
