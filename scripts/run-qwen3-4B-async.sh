#!/usr/bin/env bash
# GRPO with Qwen3-4B, generating while it trains: two GPUs for training and six for rollout
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

use_model qwen3-4B Qwen3-4B
grpo_on_math
CLUSTER_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 6)
layout 2 1 1 1 9216
SGLANG_ARGS=(--rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.7)
run train_async.py "$@"
