# GLM-4-32B-0414 and GLM-Z1-32B-0414
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

args_of_glm4 --num-layers 61 --hidden-size 6144 --ffn-hidden-size 23040 --num-attention-heads 48 --num-query-groups 2
