#!/usr/bin/env bash
# GRPO with Qwen3-8B: eight GPUs, shared by training and rollout
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

use_model qwen3-8B Qwen3-8B
grpo_on_math
CLUSTER_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate)
layout 2 1 1 1 9216
SGLANG_ARGS=(--rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.7)
run train.py "$@"
