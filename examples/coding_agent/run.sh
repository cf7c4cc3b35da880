#!/usr/bin/env bash
# Claude Code (or another agent) on repositories, with a model of yours: examples/coding_agent/run.sh MODEL_FOLDER [AGENT]
set -euo pipefail
exec python "$(dirname "$0")/run.py" --model "$1" --agent "${2:-claude_code}" --device auto --num-rollout 100 \
    --rollout-batch-size 16 --n-samples-per-prompt 8 --held-out 64 "${@:3}"
