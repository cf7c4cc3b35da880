# What the run scripts share: sourced by scripts/run-*.sh, which say what differs and end with `run train.py "$@"`.
#
# From the environment:
#   BASE_DIR       folder that holds the models and data sets under their Hugging Face names
#   HF_CHECKPOINT  the model folder                  (default: $BASE_DIR/<model>)
#   PROMPT_DATA    prompts to train on               (default: $BASE_DIR/dapo-math-17k/dapo-math-17k.jsonl)
#   EVAL_DATA      prompts to evaluate on            (default: $BASE_DIR/aime-2024/aime-2024.jsonl; empty: no evaluation)
#   SAVE_DIR       checkpoints; the same command goes on from them (default: $BASE_DIR/<model>_slime)
#   WANDB_PROJECT  report to Weights & Biases under this name
#   PYTHON         the interpreter                   (default: python3)
#   MODEL_ARGS_*   other numbers of the model: scripts/models/lib.sh
# Flags given to a run script come last, so any flag of it can be overridden: scripts/run-qwen3-4B.sh --lr 2e-6

set -euo pipefail

SCRIPT_DIR=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 2
}

# place VARIABLE WORDS PATH prints the variable, or the path below BASE_DIR; without both there is nothing to run with.
place() {
    if [[ -n ${!1+set} ]]; then
        printf %s "${!1}"
    elif [[ -n ${BASE_DIR:-} ]]; then
        printf %s "$BASE_DIR/$3"
    else
        fail "$1 is missing, $2: set it, or set BASE_DIR to the folder that has $3"
    fi
}

# use_model SCRIPT FOLDER: the model's flags, and the folder it is in.
use_model() {
    HF_CHECKPOINT=$(place HF_CHECKPOINT "the model folder" "$2")
    SAVE_DIR=$(place SAVE_DIR "the folder for checkpoints" "$2_slime")
    source "$SCRIPT_DIR/models/$1.sh"
    CKPT_ARGS=(--load "$SAVE_DIR" --save "$SAVE_DIR" --save-interval 20)
}

# Group-relative policy optimisation on mathematics: the recipe that the scripts start from.
grpo_on_math() {
    PROMPT_DATA=$(place PROMPT_DATA "the prompts to train on" dapo-math-17k/dapo-math-17k.jsonl)
    EVAL_DATA=$(place EVAL_DATA "the prompts to evaluate on" aime-2024/aime-2024.jsonl)
    ROLLOUT_ARGS=(
        --prompt-data "$PROMPT_DATA"
        --input-key prompt
        --label-key label
        --apply-chat-template
        --rollout-shuffle
        --rm-type deepscaler
        --num-rollout 3000
        --rollout-batch-size 32
        --n-samples-per-prompt 8
        --rollout-max-response-len 8192
        --rollout-temperature 1
        --global-batch-size 256
        --balance-data
    )
    EVAL_ARGS=()
    if [[ -n $EVAL_DATA ]]; then
        EVAL_ARGS=(
            --eval-interval 20
            --eval-prompt-data aime "$EVAL_DATA"
            --n-samples-per-eval-prompt 16
            --eval-max-response-len 16384
            --eval-top-p 1
        )
    fi
    GRPO_ARGS=(
        --advantage-estimator grpo
        --use-kl-loss
        --kl-loss-coef 0
        --kl-loss-type low_var_kl
        --entropy-coef 0
        --eps-clip 0.2
        --eps-clip-high 0.28
    )
    adam 1e-6 constant 0.98
    megatron_numerics
}

# adam RATE DECAY BETA2
adam() {
    OPTIMIZER_ARGS=(
        --optimizer adam
        --lr "$1"
        --lr-decay-style "$2"
        --weight-decay 0.1
        --adam-beta1 0.9
        --adam-beta2 "$3"
    )
}

megatron_numerics() {
    MISC_ARGS=(
        --attention-dropout 0
        --hidden-dropout 0
        --accumulate-allreduce-grads-in-fp32
        --attention-softmax-in-fp32
        --attention-backend flash
    )
}

# layout TP PP CP EP TOKENS: how Megatron cuts the model, and how many tokens of a batch one GPU takes at a time.
layout() {
    PERF_ARGS=(
        --tensor-model-parallel-size "$1"
        --sequence-parallel
        --pipeline-model-parallel-size "$2"
        --context-parallel-size "$3"
        --expert-model-parallel-size "$4"
        --expert-tensor-parallel-size 1
        --recompute-granularity full
        --recompute-method uniform
        --recompute-num-layers 1
        --use-dynamic-batch-size
        --max-tokens-per-gpu "$5"
    )
}

# run PROGRAM FLAG...: becomes `python PROGRAM` with all the arrays, and the flags of the command line last.
run() {
    local program=$1
    shift
    local wandb=()
    if [[ -n ${WANDB_PROJECT:-} ]]; then
        wandb=(--use-wandb --wandb-project "$WANDB_PROJECT")
    fi
    exec "${PYTHON:-python3}" "$SCRIPT_DIR/../$program" \
        "${CLUSTER_ARGS[@]}" \
        "${MODEL_ARGS[@]}" \
        "${CKPT_ARGS[@]}" \
        "${ROLLOUT_ARGS[@]}" \
        ${EVAL_ARGS[@]+"${EVAL_ARGS[@]}"} \
        ${GRPO_ARGS[@]+"${GRPO_ARGS[@]}"} \
        "${OPTIMIZER_ARGS[@]}" \
        "${PERF_ARGS[@]}" \
        ${SGLANG_ARGS[@]+"${SGLANG_ARGS[@]}"} \
        "${MISC_ARGS[@]}" \
        ${wandb[@]+"${wandb[@]}"} \
        "$@"
}
