# DeepSeek-R1: the shape of DeepSeek-V3
source "$(dirname -- "${BASH_SOURCE[0]}")/deepseek-v3.sh"
