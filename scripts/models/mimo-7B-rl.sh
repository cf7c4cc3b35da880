# MiMo-7B-RL, without its layer for multi-token prediction
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_qwen2 --num-layers 36 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --num-query-groups 8 \
    --vocab-size 151680 --rotary-base 640000 --norm-epsilon 1e-5 --untie-embeddings-and-output-weights
