# The first five layers of DeepSeek-V3, for tests
MODEL_ARGS_NUM_LAYERS="${MODEL_ARGS_NUM_LAYERS:-5}" source "$(dirname -- "${BASH_SOURCE[0]}")/deepseek-v3.sh"
