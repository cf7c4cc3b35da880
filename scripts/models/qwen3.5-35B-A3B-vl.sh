# Qwen3.5-35B-A3B as a vision model: the flags describe its language part, which is the same
source "$(dirname -- "${BASH_SOURCE[0]}")/qwen3.5-35B-A3B.sh"
