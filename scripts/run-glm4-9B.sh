#!/usr/bin/env bash
# GRPO with GLM-Z1-9B-0414: eight GPUs, four for training and four for rollout
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

use_model glm4-9B GLM-Z1-9B-0414
grpo_on_math
CLUSTER_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4)
layout 2 1 2 1 4608
SGLANG_ARGS=(--rollout-num-gpus-per-engine 1)
run train.py "$@"
