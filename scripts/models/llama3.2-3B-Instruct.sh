# Llama-3.2-3B and Llama-3.2-3B-Instruct
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_llama3 --num-layers 28 --hidden-size 3072 --ffn-hidden-size 8192 --num-attention-heads 24 --num-query-groups 8 \
    --kv-channels 128 --vocab-size 128256 --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 32
