# Llama-3.2-3B-Instruct: the model does not depend on the GPU
source "$(dirname -- "${BASH_SOURCE[0]}")/llama3.2-3B-Instruct.sh"
