# MiMo-7B-RL
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_qwen2 --num-layers 36 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --num-query-groups 8 \
    --vocab-size 151680 --rotary-base 640000 --norm-epsilon 1e-5 --mtp-num-layers 1 --untie-embeddings-and-output-weights
