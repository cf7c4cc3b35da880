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
