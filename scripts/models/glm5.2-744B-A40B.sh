# GLM-5.2: GLM-5 for longer contexts, with an index that several layers share
MODEL_ARGS_ROTARY_BASE="${MODEL_ARGS_ROTARY_BASE:-8000000}" source "$(dirname -- "${BASH_SOURCE[0]}")/glm5-744B-A40B.sh"
