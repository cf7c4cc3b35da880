"""What the layers of a model keep for the backward pass, per token.

Invariant: these are the tensors that autograd saves for transformers' decoder layers and slime's packed attention; the
numbers are checked against a real training step (`benchmarks/training_memory.py`).
"""

from __future__ import annotations

from slime.models.shape import BYTES_PER_ELEMENT, ModelShape

_WIDE = 4  # normalisations and, on a CPU, attention compute in float32


def layer_bytes(
    shape: ModelShape,
    *,
    dtype: str,
    on_gpu: bool,
    compiled: bool = False,
    fused: bool = False,
    frozen_norms: bool = False,
) -> int | None:
    """Bytes that one decoder layer keeps of one token; of a model with experts, the layer with the most.

    `compiled`, `fused`: by torch.compile, or into a few kernels of our own (`train/backends/fsdp/fused`).
    `frozen_norms`: the weights of normalisations are not trained, so what they are multiplied with is not kept.
    """
    if shape.hidden_size is None or shape.num_heads is None or shape.num_kv_heads is None or shape.head_dim is None:
        return None
    size = BYTES_PER_ELEMENT[dtype]
    hidden, queries = shape.hidden_size, shape.num_heads * shape.head_dim
    keys = shape.num_kv_heads * shape.head_dim
    narrow = shape.ffn_size or 4 * hidden
    if shape.num_moe_layers:  # a copy of the token goes into and out of each of its experts
        per_token = (shape.experts_per_token or 1) * (shape.expert_ffn_size or narrow) + shape.shared_expert_ffn_size
        routed = 2 * hidden * (shape.experts_per_token or 1)
    else:
        per_token, routed = narrow, 0
    if fused:  # both norms with their inputs; heads before and after their rotation, and attended; gate and up
        return size * (4 * hidden + 3 * queries + 3 * keys + 2 * per_token)
    if compiled:  # what is cheap is computed again, unless a matrix reads it, whose gradient needs it whole
        normed = queries + keys if shape.has_head_norms else 0
        return size * (4 * hidden + normed + 2 * queries + 2 * keys + 3 * per_token + routed)
    scaled = 0 if frozen_norms else size
    norms = shape.norms_per_layer * (_WIDE + scaled + size) * hidden  # input in float32, normalised, times its weight
    normed = (_WIDE + scaled) * (queries + keys) if shape.has_head_norms else 0
    attention = (size if on_gpu else _WIDE) * (2 * queries + 2 * keys)
    output = 0 if on_gpu else size * queries  # the CPU's attention copies what goes into the projection
    return norms + normed + attention + output + size * (4 * per_token + routed)


def root_bytes(shape: ModelShape, *, dtype: str) -> int | None:
    """Bytes of one token outside the layers: the last normalisation, and the rows that the output layer reads."""
    if shape.hidden_size is None:
        return None
    return (_WIDE + 3 * BYTES_PER_ELEMENT[dtype]) * shape.hidden_size


def layer_input_bytes(shape: ModelShape, *, dtype: str) -> int | None:
    """Bytes of one token that a layer keeps whose activations are recomputed."""
    return None if shape.hidden_size is None else BYTES_PER_ELEMENT[dtype] * shape.hidden_size
