#!/usr/bin/env bash
# GRPO with Kimi-K2-Instruct: thirty-two machines of eight GPUs
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

use_model kimi-k2 Kimi-K2-Instruct
grpo_on_math
CLUSTER_ARGS=(--actor-num-nodes 32 --actor-num-gpus-per-node 8 --colocate)
layout 8 8 4 32 16384
SGLANG_ARGS=(--rollout-num-gpus-per-engine 64 --sglang-mem-fraction-static 0.7 --sglang-enable-dp-attention --sglang-dp-size 8 --sglang-ep-size 64)
OPTIMIZER_ARGS+=(--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer)
PERF_ARGS+=(--decoder-last-pipeline-num-layers 5)
run train.py "$@"
