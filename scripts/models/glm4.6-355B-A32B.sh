# GLM-4.6: the shape of GLM-4.5
source "$(dirname -- "${BASH_SOURCE[0]}")/glm4.5-355B-A32B.sh"
