#!/usr/bin/env bash
# GRPO with Moonlight-16B-A3B-Instruct: eight GPUs, shared by training and rollout
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

use_model moonlight Moonlight-16B-A3B-Instruct
grpo_on_math
CLUSTER_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate)
layout 4 1 1 8 20480
SGLANG_ARGS=(--rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7)
run train.py "$@"
