# GLM-Z1-9B-0414: the shape of GLM-4-9B
source "$(dirname -- "${BASH_SOURCE[0]}")/glm4-9B.sh"
