# Kimi-K2-Thinking: Kimi K2 for longer contexts
MODEL_ARGS_ROTARY_SCALING_FACTOR="${MODEL_ARGS_ROTARY_SCALING_FACTOR:-64}" \
    MODEL_ARGS_NORM_EPSILON="${MODEL_ARGS_NORM_EPSILON:-1e-5}" source "$(dirname -- "${BASH_SOURCE[0]}")/kimi-k2.sh"
