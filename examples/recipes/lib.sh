# What the recipes share: sourced by run-*.sh, which say what is trained, and end with `run "$@"`.
#
# From the environment:
#   HF_CHECKPOINT   the model folder, as it was downloaded
#   PROMPT_DATA     the file of prompts to train on, as it is published (.jsonl or .parquet)
#   EVAL_DATA       the file to evaluate on; empty: no evaluation
#   SAVE_DIR        checkpoints; the same command goes on from them     (default: outputs/<recipe>)
#   NUM_GPUS        how many GPUs, of the sizes that a recipe has; from 8 on in machines of 8
#   WANDB_PROJECT   report to Weights & Biases under this name
#   PYTHON          the interpreter                                     (default: python3)
# Looking, and trying, without any model or data:
#   PLAN=80             say what the recipe takes on GPUs of 80 GiB, and stop
#   RANDOM_WEIGHTS=1    run STEPS (3) steps with random weights of the model's shape, rows that rows.py makes, and
#                       rewards that are coins. MODEL_SET="num_hidden_layers=2 hidden_size=64" makes the shape smaller
# Flags given to a recipe come last, so any flag of it can be overridden: run-qwen3-4B-gsm8k.sh --lr 2e-6

set -euo pipefail

RECIPES=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
NAME=$(basename -- "$0" .sh)
NAME=${NAME#run-}
PYTHON=${PYTHON:-python3}
SAVE_DIR=${SAVE_DIR:-outputs/$NAME}
MADE=outputs/recipes

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 2
}

slime_command() {
    PYTHONPATH="$RECIPES/../..${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" -m slime.cli "$@"
}

# sizes N...: the numbers of GPUs that a recipe has, the first of them its default.
sizes() {
    NUM_GPUS=${NUM_GPUS:-$1}
    case " $* " in
        *" $NUM_GPUS "*) ;;
        *) fail "NUM_GPUS=$NUM_GPUS: $NAME has sizes for $* GPUs; take one of them, and flags behind the name for others" ;;
    esac
    GPUS_PER_NODE=$((NUM_GPUS < 8 ? NUM_GPUS : 8))
    NODES=$((NUM_GPUS / GPUS_PER_NODE))
}

# there VARIABLE WORDS EXAMPLE: what a variable names has to be there.
there() {
    local given=${!1:-}
    [[ -n $given ]] || fail "$1 is missing, $2: $1=$3"
    [[ -e ${given%%@\[*} ]] || fail "$1=$given: there is no such file or folder, and it should be $2"
}

# model SHAPE HUB_NAME: a name of `slime models`, and where the weights are published.
model() {
    SHAPE=$1
    if [[ -n ${PLAN:-} && -z ${HF_CHECKPOINT:-} ]]; then
        HF_CHECKPOINT=$MADE/$SHAPE-shape
        slime_command models "$SHAPE" --write "$HF_CHECKPOINT"
    elif [[ -n ${RANDOM_WEIGHTS:-} && -z ${HF_CHECKPOINT:-} ]]; then
        HF_CHECKPOINT=$MADE/$SHAPE-random${MODEL_SET:+-small}
        local field changes=()
        for field in ${MODEL_SET:-}; do changes+=(--set "$field"); done
        if [[ ! -e $HF_CHECKPOINT/config.json || -n ${MODEL_SET:-} ]]; then
            echo "making $HF_CHECKPOINT, a model of the shape $SHAPE with random weights"
            slime_command models "$SHAPE" --random-weights "$HF_CHECKPOINT" ${changes[@]+"${changes[@]}"}
        fi
    fi
    there HF_CHECKPOINT "the model folder" "/models/${2#*/}, after: hf download $2 --local-dir /models/${2#*/}"
}

# data KIND TRAIN EVAL: gsm8k or dapo, and the published files.
data() {
    EVAL_ARGS=() DATA_ARGS=()
    if [[ -n ${PLAN:-} && -z ${PROMPT_DATA:-} ]]; then
        return
    elif [[ -n ${RANDOM_WEIGHTS:-} && -z ${PROMPT_DATA:-} ]]; then
        PROMPT_DATA=$MADE/$1.jsonl EVAL_DATA=
        "$PYTHON" "$RECIPES/rows.py" "$1" "$PROMPT_DATA"
    fi
    there PROMPT_DATA "the prompts to train on" "$2"
    DATA_ARGS=(--prompt-data "$PROMPT_DATA")
    if [[ -z ${EVAL_DATA+set} ]]; then
        fail "EVAL_DATA is missing, the prompts to evaluate on: EVAL_DATA=$3, or EVAL_DATA= for no evaluation"
    elif [[ -n $EVAL_DATA ]]; then
        there EVAL_DATA "the prompts to evaluate on" "$3"
        EVAL_ARGS=(--eval-prompt-data "$1" "$EVAL_DATA")
    fi
}

# run FLAG...: becomes `python train.py` with all the arrays, and the flags of the command line last.
run() {
    local last=()
    if [[ ${#EVAL_ARGS[@]} -gt 0 ]]; then
        EVAL_ARGS+=("${EVAL_HOW[@]}")
    fi
    if [[ -n ${PLAN:-} ]]; then
        last=(--dry-run --plan-cluster "${NODES}x${GPUS_PER_NODE}x$PLAN")
    elif [[ -n ${RANDOM_WEIGHTS:-} ]]; then
        REWARD_ARGS=(--rm-type random)
        CKPT_ARGS=(--hf-checkpoint "$HF_CHECKPOINT" --output-dir "$SAVE_DIR")
        last=(--num-rollout "${STEPS:-3}")
    fi
    if [[ -n ${WANDB_PROJECT:-} ]]; then
        last+=(--use-wandb --wandb-project "$WANDB_PROJECT")
    fi
    exec "$PYTHON" "$RECIPES/../../train.py" \
        "${CLUSTER_ARGS[@]}" \
        "${CKPT_ARGS[@]}" \
        ${DATA_ARGS[@]+"${DATA_ARGS[@]}"} \
        "${ROLLOUT_ARGS[@]}" \
        "${REWARD_ARGS[@]}" \
        ${EVAL_ARGS[@]+"${EVAL_ARGS[@]}"} \
        "${GRPO_ARGS[@]}" \
        "${OPTIMIZER_ARGS[@]}" \
        "${PERF_ARGS[@]}" \
        "${SGLANG_ARGS[@]}" \
        ${last[@]+"${last[@]}"} \
        "$@"
}
