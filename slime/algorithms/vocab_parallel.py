"""Vocabulary-parallel log-probs and entropy of target tokens: each rank has a part of the output layer's rows.

Invariant: values and gradients are those of `linear_log_probs` with the whole layer, on every rank; neither the logits
[T, V] nor a rank's part [T, V / n] of them are ever materialised. All ranks have the same hidden states and targets.
Forward reduces three numbers per row over the ranks, backward the gradient of the hidden states, one chunk at a time.

    lse = log sum_r exp(lse_r);    H = lse - sum_r exp(lse_r - lse) * mean_r;    log p(y) = z_y - lse

with lse_r the log-normaliser and mean_r the mean logit of rank r's part, and z_y from the rank that has y.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from slime.algorithms.logit_transform import LogitTransform
from slime.algorithms.logprobs import (
    add_product_,
    chunk_gradient,
    chunk_stats,
    matmul_f32,
    prepared_weight,
    rows_per_chunk,
)


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


def vocab_parallel_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    part: VocabularyPart,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    chunk_rows: int = -1,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probs [T] of `targets` [T] and, with `with_entropy`, entropies [T].

    `weight` [rows, H] and `bias` are those of this rank. It is a collective: all ranks of the part call it together,
    forward and backward.
    """
    transform = LogitTransform(scale=scale, softcap=softcap, temperature=temperature)
    rows = rows_per_chunk(-(-part.vocab_size // part.ranks.size), hidden.device, chunk_rows)  # the same on all ranks
    return _VocabParallelLogProbs.apply(hidden, weight, bias, targets, part, transform, rows, with_entropy)


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        part: VocabularyPart,
        transform: LogitTransform,
        rows: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        own = part.own_rows(weight)
        columns = part.find(targets, own)
        part_normaliser = torch.full((len(hidden),), float("-inf"), dtype=dtype, device=hidden.device)
        sums = part_normaliser.new_zeros(3 if with_entropy else 2, len(hidden))
        factor = prepared_weight(weight[:own])
        for begin in range(0, len(hidden) if own else 0, rows):
            span = slice(begin, begin + rows)
            own_bias = bias[:own] if bias is not None else None
            found = chunk_stats(hidden[span], factor, own_bias, columns[span], transform, with_entropy=with_entropy)
            part_normaliser[span], sums[1, span], entropy_of_part = found
            if entropy_of_part is not None:
                sums[2, span] = part_normaliser[span] - entropy_of_part
        top = part.ranks.max(part_normaliser.clone())
        sums[0] = part_normaliser.sub_(top).exp_()
        if with_entropy:
            sums[2] *= sums[0]
        sums = part.ranks.sum(sums)
        normaliser = sums[0].log().add_(top)
        entropy = normaliser - sums[2] / sums[0] if with_entropy else None
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy)
        ctx.part, ctx.transform, ctx.rows = part, transform, rows
        return sums[1] - normaliser, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_log_probs, grad_entropy = grads
        hidden, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        own = ctx.part.own_rows(weight)
        columns = ctx.part.find(targets, own)
        wide = {"dtype": normaliser.dtype, "device": hidden.device}
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros(weight.shape, **wide) if need_weight else None
        grad_bias = torch.zeros(bias.shape, **wide) if need_bias else None
        factor = prepared_weight(weight[:own])
        for begin in range(0, len(hidden), ctx.rows):
            span = slice(begin, begin + ctx.rows)
            toward = torch.zeros(hidden[span].shape, **wide)
            if own:
                d_logits = chunk_gradient(
                    hidden[span],
                    factor,
                    bias[:own] if bias is not None else None,
                    columns[span],
                    normaliser[span],
                    grad_log_probs[span] if grad_log_probs is not None else None,
                    (grad_entropy[span], entropy[span]) if grad_entropy is not None else None,
                    ctx.transform,
                )
                toward = matmul_f32(d_logits, factor)
                if grad_weight is not None:
                    add_product_(grad_weight[:own], d_logits.t(), hidden[span].to(d_logits.dtype))
                if grad_bias is not None:
                    grad_bias[:own].add_(d_logits.sum(dim=0, dtype=normaliser.dtype))
            if grad_hidden is not None:
                grad_hidden[span] = ctx.part.ranks.sum(toward).to(hidden.dtype)
        return (
            grad_hidden,
            grad_weight.to(weight.dtype) if grad_weight is not None else None,
            grad_bias.to(bias.dtype) if grad_bias is not None else None,
            *(None,) * 5,
        )
