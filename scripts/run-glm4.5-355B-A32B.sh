#!/usr/bin/env bash
# GRPO with GLM-4.5 (GLM-4.6 and GLM-4.7 with their HF_CHECKPOINT): eight machines of eight GPUs
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

use_model glm4.5-355B-A32B GLM-4.5
grpo_on_math
CLUSTER_ARGS=(--actor-num-nodes 8 --actor-num-gpus-per-node 8 --colocate)
layout 8 4 2 16 16384
SGLANG_ARGS=(--rollout-num-gpus-per-engine 32 --sglang-mem-fraction-static 0.7 --sglang-enable-dp-attention --sglang-dp-size 4 --sglang-ep-size 32)
OPTIMIZER_ARGS+=(--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer)
run train.py "$@"
