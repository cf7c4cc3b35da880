"""Log-probs and entropy of target tokens from hidden states, or from given logits.

Invariant: the [T, V] matrix of logits is never materialised unless the caller passes it. Rows are computed in chunks
(on a Hopper GPU without any logits). Forward keeps two numbers per row (the log-normaliser and, with `with_entropy`,
the entropy), and backward recomputes each chunk's logits; or, on a GPU, forward keeps the gradients of the log-probs
[T, V] in the weight's dtype, if they fit into the limit of the caller. Logits and everything derived from them are
float32; matrix products read the parameter dtype and accumulate in float32. The choice between keeping and recomputing
changes how numbers are rounded: it depends on sizes and flags, never on the free memory.

    u = scale * (hidden @ weight.T + bias);  v = softcap * tanh(u / softcap);  z = v / temperature
    log p(y) = z_y - logsumexp(z);           H = logsumexp(z) - sum_j p_j z_j
    dL/dz_j = g_logp * (1[j = y] - p_j) - g_H * p_j * (z_j - logsumexp(z) + H)

Each rank may have a part of the output layer's rows (`VocabularyPart`). Invariant: values and gradients are those of
the whole layer, on every rank. All ranks have the same hidden states and targets. Forward reduces three numbers per row
over the ranks, backward the gradient of the hidden states, one chunk at a time.

    lse = log sum_r exp(lse_r);    H = lse - sum_r exp(lse_r - lse) * mean_r;    log p(y) = z_y - lse

with lse_r the log-normaliser and mean_r the mean logit of rank r's part, and z_y from the rank that has y.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from slime.algorithms.logit_transform import LogitTransform

CHUNK_LOGITS_CUDA = 3072 * 151936  # entries; about 1.9 GB of float32
CHUNK_LOGITS_CPU = 16 * 1024 * 1024
KEPT_BYTES = 2 << 30  # limit of the gradients that are kept for the backward; --log-probs-keep-gib
FUSED_SHARE = 128  # rows of the fused head that need the memory of one row of logits: the columns of its tiles
FUSED_CAPABILITY = 9  # compute capability of Hopper
FUSED_ALIGNMENT = 16  # bytes; the copy engine of the fused head needs addresses and rows that are multiples of it


def rows_per_chunk(vocab: int, device: torch.device, chunk_rows: int) -> int:
    """Return the rows of a chunk: `chunk_rows` if positive, else as many as the default chunk of logits has."""
    if chunk_rows > 0:
        return chunk_rows
    budget = CHUNK_LOGITS_CUDA if device.type == "cuda" else CHUNK_LOGITS_CPU
    return max(1, budget // vocab)


def matmul_f32(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices with a float32 result; on CUDA half-precision factors are not widened."""
    if left.dtype in (torch.float32, torch.float64):
        return torch.mm(left, right.to(left.dtype))
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left.float(), right.float())


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to the float32 `total`; on CUDA within the product itself."""
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.add_(matmul_f32(left, right))


class VocabularyGroup(Protocol):
    """Reductions over the ranks that share a vocabulary; both work in place and return their argument."""

    @property
    def size(self) -> int: ...

    def sum(self, values: Tensor) -> Tensor: ...

    def max(self, values: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class VocabularyPart:
    """This rank's rows of the output layer: `first`, `first + 1`, ...; rows from `vocab_size` on are padding.

    Padding is in no softmax and gets no gradient.
    """

    first: int
    vocab_size: int
    ranks: VocabularyGroup

    def own_rows(self, weight: Tensor) -> int:
        """Count the rows of this rank's weight that are tokens."""
        return min(max(self.vocab_size - self.first, 0), len(weight))

    def find(self, targets: Tensor, rows: int) -> Tensor:
        """Return the column of each target in this part, -1 for a target of another rank."""
        local = targets - self.first
        return torch.where((local >= 0) & (local < rows), local, -1)


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: LogitTransform,
        rows: int,
        with_entropy: bool,
        keeps: bool,
        part: VocabularyPart | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        own = len(weight) if part is None else part.own_rows(weight)
        columns = targets if part is None else part.find(targets, own)
        factor, own_bias = prepared_weight(weight[:own]), None if bias is None else bias[:own]
        normaliser = torch.full((len(hidden),), float("-inf"), dtype=dtype, device=hidden.device)
        picked = torch.zeros_like(normaliser)
        entropy = torch.zeros_like(normaliser) if with_entropy else None
        kept = weight.new_empty(len(hidden), len(weight)) if keeps else None
        together = rows * FUSED_SHARE if part is None and not keeps and has_fused_head(hidden, factor) else rows
        for begin in range(0, len(hidden) if own else 0, together):
            span = slice(begin, begin + together)
            keep = kept[span] if kept is not None else None
            found = chunk_stats(
                hidden[span], factor, own_bias, columns[span], transform, with_entropy=with_entropy, keep=keep
            )
            normaliser[span], picked[span], entropies = found
            if entropy is not None and entropies is not None:
                entropy[span] = entropies
        if part is not None:
            top = part.ranks.max(normaliser.clone())
            share = torch.sub(normaliser, top).exp_()
            sums = [share, picked]
            if entropy is not None:
                sums.append((normaliser - entropy) * share if own else torch.zeros_like(share))
            joined = part.ranks.sum(torch.stack(sums))
            normaliser, picked = joined[0].log().add_(top), joined[1]
            entropy = normaliser - joined[2] / joined[0] if with_entropy else None
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy, kept)
        ctx.transform, ctx.rows, ctx.part = transform, rows, part
        return picked - normaliser, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_log_probs, grad_entropy = grads
        hidden, weight, bias, targets, normaliser, entropy, kept = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        if kept is not None and grad_log_probs is not None and grad_entropy is None:
            toward = grad_log_probs[:, None]  # scales a kept row
            grad_hidden = matmul_f32(kept, weight).mul_(toward).to(hidden.dtype) if need_hidden else None
            grad_weight = torch.mm(kept.t(), (hidden * toward).to(kept.dtype)) if need_weight else None
            return grad_hidden, grad_weight, *(None,) * 7
        part: VocabularyPart | None = ctx.part
        own = len(weight) if part is None else part.own_rows(weight)
        columns = targets if part is None else part.find(targets, own)
        factor, own_bias = prepared_weight(weight[:own]), None if bias is None else bias[:own]
        wide = {"dtype": normaliser.dtype, "device": hidden.device}
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros(weight.shape, **wide) if need_weight else None
        grad_bias = torch.zeros(bias.shape, **wide) if need_bias else None
        for begin in range(0, len(hidden), ctx.rows):
            span = slice(begin, begin + ctx.rows)
            if own:
                d_logits = chunk_gradient(
                    hidden[span],
                    factor,
                    own_bias,
                    columns[span],
                    normaliser[span],
                    grad_log_probs[span] if grad_log_probs is not None else None,
                    (grad_entropy[span], entropy[span]) if grad_entropy is not None else None,
                    ctx.transform,
                )
                if grad_weight is not None:
                    add_product_(grad_weight[:own], d_logits.t(), hidden[span].to(d_logits.dtype))
                if grad_bias is not None:
                    grad_bias[:own].add_(d_logits.sum(dim=0, dtype=normaliser.dtype))
            if grad_hidden is None:
                continue
            if part is None:
                grad_hidden[span] = torch.mm(d_logits, factor).to(hidden.dtype)
            else:
                toward = matmul_f32(d_logits, factor) if own else torch.zeros(hidden[span].shape, **wide)
                grad_hidden[span] = part.ranks.sum(toward).to(hidden.dtype)
        return (
            grad_hidden,
            grad_weight.to(weight.dtype) if grad_weight is not None else None,
            grad_bias.to(bias.dtype) if grad_bias is not None else None,
            *(None,) * 6,
        )


def chunk_stats(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: LogitTransform,
    *,
    with_entropy: bool,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute for each row the log-normaliser, the target's logit (0 for the target -1), and optionally the entropy.

    `keep`, with kernels: the output for the gradients of the log-probs with respect to the raw projection.
    """
    if keep is None and has_fused_head(hidden, weight):
        from slime.algorithms.fused_head import projected_stats

        return projected_stats(hidden, weight, bias, targets, transform, with_entropy=with_entropy)
    if has_kernels(hidden):
        from slime.algorithms.fused_head import logits_gradient, softmax_stats

        raw = matmul_f32(hidden.to(weight.dtype), weight.t())
        found = softmax_stats(raw, bias, targets, transform, with_entropy=with_entropy)
        if keep is not None:
            logits_gradient(raw, bias, targets, found[0], torch.ones_like(found[0]), None, transform, out=keep)
        return found
    z = chunk_logits(hidden, weight, bias, transform)
    picked = z.gather(1, targets.clamp(min=0)[:, None]).squeeze(1).mul_(targets >= 0)
    if not with_entropy:
        return normaliser_(z), picked, None
    normaliser, entropy = normaliser_and_entropy(z)
    return normaliser, picked, entropy


def chunk_gradient(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    normaliser: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: tuple[Tensor, Tensor] | None,
    transform: LogitTransform,
) -> Tensor:
    """Compute dL/d(raw projection) in the weight's dtype; a row without a target among the columns has -1."""
    if has_kernels(hidden):
        from slime.algorithms.fused_head import logits_gradient

        raw = matmul_f32(hidden.to(weight.dtype), weight.t())
        found = torch.empty_like(raw, dtype=weight.dtype)
        logits_gradient(raw, bias, targets, normaliser, grad_log_probs, grad_entropy, transform, out=found)
        return found
    z, is_here = chunk_logits(hidden, weight, bias, transform), targets >= 0
    columns, grads = targets.clamp(min=0), (grad_log_probs, grad_entropy)
    return grad_of_chunk(z, columns, normaliser, *grads, transform, out_dtype=weight.dtype, is_here=is_here)


def has_kernels(states: Tensor) -> bool:
    """Return True if a chunk's logits are processed by the kernels, which read float32."""
    return states.is_cuda and states.dtype != torch.float64


def has_fused_head(hidden: Tensor, weight: Tensor) -> bool:
    """Return True if statistics are computed without logits: on Hopper, with aligned half-precision weights."""
    if not has_kernels(hidden) or weight.dtype not in (torch.bfloat16, torch.float16) or not len(hidden):
        return False
    if torch.cuda.get_device_capability(weight.device)[0] != FUSED_CAPABILITY or not weight.is_contiguous():
        return False
    return not any(count % FUSED_ALIGNMENT for count in (weight.data_ptr(), weight.shape[1] * weight.element_size()))


def keeps_gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None, most: int) -> bool:
    """Return True if a backward follows whose gradients of the log-probs take at most `most` bytes."""
    follows = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if bias is not None or not follows or not has_kernels(hidden):
        return False
    return len(hidden) * len(weight) * weight.element_size() <= most


def normaliser_(z: Tensor) -> Tensor:
    """Compute logsumexp of each row; overwrites `z`."""
    top = z.amax(dim=1, keepdim=True)
    return z.sub_(top).exp_().sum(dim=1).log_().add_(top.squeeze(1))


def normaliser_and_entropy(z: Tensor) -> tuple[Tensor, Tensor]:
    """Compute logsumexp and entropy of each row."""
    top = z.amax(dim=1, keepdim=True)
    exponentials = torch.sub(z, top).exp_()
    total = exponentials.sum(dim=1)
    mean_logit = exponentials.mul_(z).sum(dim=1).div_(total)  # in place: a third copy of the chunk would be the peak
    normaliser = total.log_().add_(top.squeeze(1))
    return normaliser, normaliser - mean_logit


def prepared_weight(weight: Tensor) -> Tensor:
    """Widen half-precision weights on the CPU, once per call instead of once per chunk."""
    return weight.float() if weight.dtype in (torch.bfloat16, torch.float16) and not weight.is_cuda else weight


def chunk_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: LogitTransform) -> Tensor:
    logits = matmul_f32(hidden.to(weight.dtype), weight.t())
    if bias is not None:
        logits.add_(bias)
    return transform.apply_(logits)


def grad_of_chunk(
    z: Tensor,
    targets: Tensor,
    normaliser: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: tuple[Tensor, Tensor] | None,
    transform: LogitTransform,
    *,
    out_dtype: torch.dtype,
    is_here: Tensor | None = None,
) -> Tensor:
    """Compute dL/d(raw projection) of one chunk; overwrites `z`.

    `is_here`: if the columns are a part of the vocabulary, the rows whose target is one of them (None: all).
    """
    slope = transform.slope(z)
    if grad_entropy is None:
        if grad_log_probs is None:
            return torch.zeros_like(z, dtype=out_dtype)
        probabilities = z.sub_(normaliser[:, None]).exp_()
        hits = torch.full_like(targets, -1, dtype=z.dtype) if is_here is None else is_here.to(z.dtype).neg_()
        probabilities.scatter_add_(1, targets[:, None], hits[:, None])
        if isinstance(slope, float):
            result = z if z.dtype == out_dtype else torch.empty_like(z, dtype=out_dtype)
            return torch.mul(probabilities, (grad_log_probs * -slope)[:, None], out=result)
        return probabilities.mul_(-grad_log_probs[:, None]).mul_(slope).to(out_dtype)
    upstream, entropy = grad_entropy
    log_p = z.sub_(normaliser[:, None])
    probabilities = log_p.exp()
    weighting = log_p.add_(entropy[:, None]).mul_(upstream[:, None])
    if grad_log_probs is not None:
        weighting.add_(grad_log_probs[:, None])
    result = probabilities.mul_(weighting).neg_()
    if grad_log_probs is not None:
        hits = grad_log_probs if is_here is None else grad_log_probs * is_here
        result.scatter_add_(1, targets[:, None], hits[:, None].to(result.dtype))
    return result.mul_(slope).to(out_dtype)


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    chunk_rows: int = -1,
    with_entropy: bool = False,
    keep_bytes: int = KEPT_BYTES,
    part: VocabularyPart | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probs [T] of `targets` [T] under softmax(z) and, with `with_entropy`, its entropy [T].

    With `part` the `weight` [rows, H] and the bias are those of this rank. It is a collective then: all ranks of the
    part call it together, forward and backward.
    """
    transform = LogitTransform(scale=scale, softcap=softcap, temperature=temperature)
    vocab = len(weight) if part is None else -(-part.vocab_size // part.ranks.size)  # the same on all ranks
    rows = rows_per_chunk(vocab, hidden.device, chunk_rows)
    keeps = part is None and keeps_gradients(hidden, weight, bias, keep_bytes)
    return _LinearLogProbs.apply(hidden, weight, bias, targets, transform, rows, with_entropy, keeps, part)


class _LogProbsOfLogits(torch.autograd.Function):
    """Keeps the given logits and two numbers per row; nothing else of their size outlives a chunk."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, rows: int, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        normaliser = torch.empty(len(logits), dtype=dtype, device=logits.device)
        entropy = torch.empty_like(normaliser) if with_entropy else None
        for begin in range(0, len(logits), rows):
            span = slice(begin, begin + rows)
            z = logits[span].to(dtype, copy=True)
            if entropy is None:
                normaliser[span] = normaliser_(z)
            else:
                normaliser[span], entropy[span] = normaliser_and_entropy(z)
        picked = logits.gather(1, targets[:, None]).squeeze(1).to(dtype)
        ctx.save_for_backward(logits, targets, normaliser, entropy)
        ctx.rows = rows
        return picked - normaliser, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_log_probs, grad_entropy = grads
        logits, targets, normaliser, entropy = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for begin in range(0, len(logits), ctx.rows):
            span = slice(begin, begin + ctx.rows)
            grad_logits[span] = grad_of_chunk(
                logits[span].to(normaliser.dtype, copy=True),
                targets[span],
                normaliser[span],
                grad_log_probs[span] if grad_log_probs is not None else None,
                (grad_entropy[span], entropy[span]) if grad_entropy is not None else None,
                LogitTransform(scale=1.0, softcap=None, temperature=1.0),
                out_dtype=normaliser.dtype,
            )
        return grad_logits, None, None, None


def log_probs_of_logits(
    logits: Tensor, targets: Tensor, *, chunk_rows: int = -1, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probs [T] of `targets` [T] under softmax(logits [T, V]) and, with `with_entropy`, its entropy [T]."""
    rows = rows_per_chunk(logits.shape[1], logits.device, chunk_rows)
    return _LogProbsOfLogits.apply(logits, targets, rows, with_entropy)
