# MiniMax-M2
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_minimax_m2 --num-layers 62 --hidden-size 3072 --ffn-hidden-size 1536 \
    --num-attention-heads 48 --num-query-groups 8 --kv-channels 128 --vocab-size 200064 --rotary-base 5000000 \
    --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 1536
