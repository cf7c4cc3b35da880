# What the model scripts of this folder share: sourced by them, does nothing by itself.
#
#     source scripts/models/qwen3-4B.sh
#     python train.py "${MODEL_ARGS[@]}" --hf-checkpoint /models/Qwen3-4B ...
#
# A model script sets the array MODEL_ARGS to the model's shape in Megatron's flag names, nothing else. From the
# environment it takes two things:
#   MODEL_ARGS_<FLAG>  replaces a number: MODEL_ARGS_NUM_LAYERS=4 for --num-layers, MODEL_ARGS_ROTARY_BASE, and so on;
#                      MODEL_ARGS_DENSE_LAYERS is how many layers of a mixture-of-experts model have no experts.
#   HF_CHECKPOINT      adds --hf-checkpoint, for commands that name no model folder.
#
# Works with bash 3.2 and newer, under set -eu, from any folder.

# model_args WORD... sets MODEL_ARGS. "--dense-layers N" becomes Megatron's --moe-layer-freq, one number per layer.
model_args() {
    local word flag="" variable layers=0 dense=""
    MODEL_ARGS=()
    for word in "$@"; do
        if [[ $word == --* ]]; then
            flag=$word
        elif [[ $word =~ ^[0-9] ]]; then
            variable=MODEL_ARGS_$(printf %s "${flag#--}" | tr 'a-z-' 'A-Z_')
            word=${!variable:-$word}
        fi
        if [[ $flag == --dense-layers ]]; then
            dense=${word#--dense-layers}
            continue
        fi
        if [[ $flag == --num-layers ]]; then
            layers=${word#--num-layers}
        fi
        MODEL_ARGS+=("$word")
    done
    if [[ -n $dense ]]; then
        MODEL_ARGS+=(--moe-layer-freq "$(_moe_layer_freq "$dense" "$layers")")
    fi
    if [[ -n ${HF_CHECKPOINT:-} ]]; then
        MODEL_ARGS+=(--hf-checkpoint "$HF_CHECKPOINT")
    fi
}

# No blanks: commands that expand ${MODEL_ARGS[@]} without quotes keep it one word.
_moe_layer_freq() {
    local layer list=""
    for ((layer = 0; layer < $2; layer++)); do
        list+=,$((layer < $1 ? 0 : 1))
    done
    printf '[%s]' "${list#,}"
}

# One function per family: what all its models have in common.

_args_of_dense() {
    model_args --swiglu --disable-bias-linear --normalization RMSNorm --use-rotary-position-embeddings "$@"
}

args_of_llama3() {
    _args_of_dense --group-query-attention --norm-epsilon 1e-5 "$@"
}

args_of_qwen2() {
    _args_of_dense --group-query-attention --add-qkv-bias "$@"
}

args_of_qwen3() {
    _args_of_dense --group-query-attention --qk-layernorm --norm-epsilon 1e-6 "$@"
}

# A router of softmaxes: its first word is the function of the family that has it.
_with_softmax_router() {
    local family=$1
    shift
    "$family" --untie-embeddings-and-output-weights --dense-layers 0 --moe-router-score-function softmax \
        --moe-router-load-balancing-type none --moe-aux-loss-coeff 0 --moe-router-dtype fp32 \
        --moe-token-drop-policy probs --moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-permute-fusion "$@"
}

args_of_qwen3_moe() {
    _with_softmax_router args_of_qwen3 "$@"
}

# Three of four layers are linear attention, the fourth is gated full attention.
args_of_qwen3_hybrid() {
    args_of_qwen3 --attention-output-gate --apply-layernorm-1p --rotary-percent 0.25 --kv-channels 256 \
        --rotary-base 10000000 --experimental-attention-variant gated_delta_net --linear-attention-freq 4 \
        --linear-key-head-dim 128 --linear-value-head-dim 128 --linear-conv-kernel-dim 4 "$@"
}

args_of_qwen3_hybrid_moe() {
    _with_softmax_router args_of_qwen3_hybrid --moe-shared-expert-gate "$@"
}

args_of_glm4() {
    _args_of_dense --group-query-attention --untie-embeddings-and-output-weights --norm-epsilon 1e-5 \
        --rotary-percent 0.5 --rotary-interleaved --rotary-base 10000 --vocab-size 151552 \
        --post-self-attn-layernorm --post-mlp-layernorm "$@"
}

# A router of sigmoids with a bias per expert, which training leaves as it is.
_args_of_biased_router() {
    _args_of_dense --untie-embeddings-and-output-weights --moe-router-pre-softmax --moe-router-score-function sigmoid \
        --moe-router-enable-expert-bias --moe-router-bias-update-rate 0 --moe-router-load-balancing-type seq_aux_loss \
        --moe-aux-loss-coeff 0 --moe-router-dtype fp32 --moe-token-dispatcher-type alltoall --moe-grouped-gemm \
        --moe-permute-fusion "$@"
}

args_of_glm4_moe() {
    _args_of_biased_router --group-query-attention --add-qkv-bias --norm-epsilon 1e-5 --rotary-percent 0.5 \
        --rotary-base 1000000 --kv-channels 128 --vocab-size 151552 "$@"
}

args_of_minimax_m2() {
    _args_of_biased_router --group-query-attention --qk-layernorm --norm-epsilon 1e-6 --rotary-percent 0.5 \
        --dense-layers 0 "$@"
}

# Multi-latent attention: DeepSeek V3 and what followed it.
args_of_deepseek_v3() {
    _args_of_biased_router --multi-latent-attention --position-embedding-type rope --qk-layernorm --no-rope-fusion \
        --attention-softmax-in-fp32 --kv-lora-rank 512 --qk-pos-emb-head-dim 64 "$@"
}

# Sparse attention over what an indexer picks.
args_of_glm_dsa() {
    args_of_deepseek_v3 --norm-epsilon 1e-5 --allgather-cp --experimental-attention-variant dsa --dsa-indexer-n-heads 32 \
        --dsa-indexer-head-dim 128 --dsa-indexer-topk 2048 "$@"
}
