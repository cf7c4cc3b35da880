#!/usr/bin/env bash
# Supervised fine-tuning of Qwen3-4B-Base on conversations (PROMPT_DATA, column messages): eight GPUs
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

use_model qwen3-4B Qwen3-4B-Base
PROMPT_DATA=$(place PROMPT_DATA "the conversations to train on" openhermes2_5/openhermes2_5.parquet)
CLUSTER_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 8)
ROLLOUT_ARGS=(
    --rollout-function-path slime.rollout.sft_rollout.generate_rollout
    --prompt-data "$PROMPT_DATA"
    --input-key messages
    --rollout-shuffle
    --num-epoch 3
    --rollout-batch-size 128
    --global-batch-size 128
    --loss-type sft_loss
    --calculate-per-token-loss
    --disable-compute-advantages-and-returns
    --debug-train-only
)
adam 1e-5 cosine 0.95
OPTIMIZER_ARGS+=(--min-lr 1e-6 --lr-warmup-fraction 0.1)
layout 1 1 1 1 9216
megatron_numerics
run train_async.py "$@"
