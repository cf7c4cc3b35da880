"""Softmax statistics and gradients of a chunk of logits in one pass each (Triton).

Invariant: what is read is the raw float32 projection, what is computed is float32, and nothing of the chunk's size is
written but the gradient, in the dtype of the matrix products that follow.

    u = scale * (raw + bias);  v = softcap * tanh(u / softcap);  z = v / temperature
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slime.algorithms.logit_transform import LogitTransform

STATS_BLOCK, STATS_WARPS = 2048, 4
GRADIENT_BLOCK, GRADIENT_WARPS = 2048, 4


@triton.jit
def _tanh(x):
    return 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0


@triton.jit
def transformed(raw, bias, columns, here, factor, cap_in, cap_out, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr):
    """z of raw logits; `factor` is scale / temperature, or with a cap `cap_in` scale / softcap and `cap_out`
    softcap / temperature."""
    if HAS_BIAS:
        raw += tl.load(bias + columns, mask=here, other=0.0).to(tl.float32)
    if HAS_CAP:
        return _tanh(raw * cap_in) * cap_out
    return raw * factor


@triton.jit
def _stats(
    raw,
    bias,
    targets,
    normaliser,
    picked,
    entropy,
    vocab,
    row_stride,
    factor,
    cap_in,
    cap_out,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program: running maximum, sum of exponentials and of exponentials times logits, a lane each."""
    row = tl.program_id(0).to(tl.int64)
    top = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        here = columns < vocab
        z = tl.load(raw + row * row_stride + columns, mask=here, other=0.0)
        z = transformed(z, bias, columns, here, factor, cap_in, cap_out, HAS_BIAS, HAS_CAP)
        higher = tl.maximum(top, tl.where(here, z, -1e30))
        shrink = tl.exp(top - higher)
        part = tl.where(here, tl.exp(z - higher), 0.0)
        total = total * shrink + part
        if WITH_ENTROPY:
            weighted = weighted * shrink + part * z
        top = higher
    highest = tl.max(top, axis=0)
    shrink = tl.exp(top - highest)
    whole = tl.sum(total * shrink, axis=0)
    log_total = tl.log(whole) + highest
    tl.store(normaliser + row, log_total)
    if WITH_ENTROPY:
        tl.store(entropy + row, log_total - tl.sum(weighted * shrink, axis=0) / whole)
    target = tl.load(targets + row)
    here = target >= 0
    z = tl.load(raw + row * row_stride + target, mask=here, other=0.0)
    z = transformed(z, bias, target, here, factor, cap_in, cap_out, HAS_BIAS, HAS_CAP)
    tl.store(picked + row, tl.where(here, z, 0.0))


@triton.jit
def _gradient(
    raw,
    bias,
    targets,
    normaliser,
    entropy,
    grad_log_probs,
    grad_entropy,
    out,
    vocab,
    row_stride,
    factor,
    cap_in,
    cap_out,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of one row a program; a row without a target among the columns has the target -1."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = columns < vocab
    z = tl.load(raw + row * row_stride + columns, mask=here, other=0.0)
    z = transformed(z, bias, columns, here, factor, cap_in, cap_out, HAS_BIAS, HAS_CAP)
    upstream = tl.load(grad_log_probs + row)
    log_p = z - tl.load(normaliser + row)
    weight = upstream
    if WITH_ENTROPY:
        weight += tl.load(grad_entropy + row) * (log_p + tl.load(entropy + row))
    found = tl.where(columns == tl.load(targets + row), upstream, 0.0) - tl.exp(log_p) * weight
    if HAS_CAP:
        ratio = z / cap_out
        found *= (1.0 - ratio * ratio) * factor
    else:
        found *= factor
    tl.store(out + row * vocab + columns, found.to(out.dtype.element_ty), mask=here)


def softmax_stats(
    raw: Tensor, bias: Tensor | None, targets: Tensor, transform: LogitTransform, *, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of each row [R]: the log-normaliser, the logit of its target (0 where that is -1), the entropy when asked for."""
    rows, vocab = raw.shape
    normaliser, picked = (torch.empty(rows, dtype=torch.float32, device=raw.device) for _ in range(2))
    entropy = torch.empty_like(normaliser) if with_entropy else None
    _stats[(rows,)](
        raw,
        bias,
        targets,
        normaliser,
        picked,
        entropy,
        vocab,
        raw.stride(0),
        *factors(transform),
        HAS_BIAS=bias is not None,
        HAS_CAP=transform.softcap is not None,
        WITH_ENTROPY=with_entropy,
        BLOCK=STATS_BLOCK,
        num_warps=STATS_WARPS,
    )
    return normaliser, picked, entropy


def logits_gradient(
    raw: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    normaliser: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: tuple[Tensor, Tensor] | None,
    transform: LogitTransform,
    *,
    out: Tensor,
) -> None:
    """dL/d(raw projection) [R, V] into `out`; `grad_entropy`: its gradient and the entropy itself."""
    assert out.is_contiguous()
    rows, vocab = raw.shape
    upstream = torch.zeros_like(normaliser) if grad_log_probs is None else grad_log_probs.contiguous()
    toward_entropy, entropy = (None, None) if grad_entropy is None else (part.contiguous() for part in grad_entropy)
    _gradient[(rows, triton.cdiv(vocab, GRADIENT_BLOCK))](
        raw,
        bias,
        targets,
        normaliser,
        entropy,
        upstream,
        toward_entropy,
        out,
        vocab,
        raw.stride(0),
        *factors(transform),
        HAS_BIAS=bias is not None,
        HAS_CAP=transform.softcap is not None,
        WITH_ENTROPY=grad_entropy is not None,
        BLOCK=GRADIENT_BLOCK,
        num_warps=GRADIENT_WARPS,
    )


def factors(transform: LogitTransform) -> tuple[float, float, float]:
    """What `transformed` multiplies by: without a cap, before it, after it."""
    factor = transform.scale / transform.temperature
    if transform.softcap is None:
        return factor, 1.0, 1.0
    return factor, transform.scale / transform.softcap, transform.softcap / transform.temperature
