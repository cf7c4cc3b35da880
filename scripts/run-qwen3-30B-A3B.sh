#!/usr/bin/env bash
# GRPO with Qwen3-30B-A3B: eight GPUs, shared by training and rollout; optimizer states in CPU memory
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

use_model qwen3-30B-A3B Qwen3-30B-A3B
grpo_on_math
CLUSTER_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate)
layout 4 1 1 8 20480
SGLANG_ARGS=(--rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7)
OPTIMIZER_ARGS+=(--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer)
run train.py "$@"
