"""The two halves of a plain decoder layer around its attention, and the norm after the last one, with gradients.

Invariant: queries, keys and values are one matrix product, as are gate and up; the joined weights are made for each
pass and never kept. What is cheap (silu(gate) * up) is computed again in backward; what a product reads is kept.
In 8-bit floats only the products of the forward are: gradients are those of the products that they stand for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slime.train.backends.fsdp.fused import float8, kernels
from slime.train.backends.fsdp.fused.facts import LayerFacts
from slime.train.samples.shared_prompts import SharedPrompts


class ToHeads(torch.autograd.Function):
    """Hidden states to queries, keys and values; they pass through, so that their two gradients are added here.

    Of `shared` prompts there are hidden states for each token that is computed, and the others for all of the row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [t, H]
        cos: Tensor,  # [t, D]
        sin: Tensor,
        norm: Tensor,
        facts: LayerFacts,
        shared: SharedPrompts | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_bias: Tensor | None,
        k_bias: Tensor | None,
        v_bias: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        _, normed, rstd = kernels.norm(hidden, norm, facts.eps)
        added = None if q_bias is None or k_bias is None or v_bias is None else torch.cat((q_bias, k_bias, v_bias))
        rows = _product(normed, torch.cat((q, k, v)), facts, added)
        norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
        heads = kernels.rotate(rows, cos, sin, norms, facts.head_eps, facts.heads, facts.kv_heads, shared)
        ctx.save_for_backward(hidden, cos, sin, norm, q, k, v, q_norm, k_norm, normed, rstd, rows)
        ctx.facts, ctx.shared = facts, shared
        return *heads, hidden

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dv, passed = grads
        hidden, cos, sin, norm, q, k, v, q_norm, k_norm, normed, rstd, rows = ctx.saved_tensors
        norms = None if q_norm is None else (q_norm, k_norm)
        d_rows, d_norms = kernels.rotate_gradient((dq, dk, dv), rows, cos, sin, norms, ctx.facts.head_eps, ctx.shared)
        needs = ctx.needs_input_grad
        d_hidden, d_norm = kernels.norm_gradient(d_rows @ torch.cat((q, k, v)), hidden, norm, rstd, passed)
        sizes = [len(q), len(k), len(v)]
        d_weights = (d_rows.t() @ normed).split(sizes) if any(needs[6:9]) else (None,) * 3
        d_biases = d_rows.sum(0).split(sizes) if any(needs[9:12]) else (None,) * 3
        return d_hidden, None, None, d_norm, None, None, *d_weights, *d_biases, *(d_norms or (None, None))


class FromHeads(torch.autograd.Function):
    """What attention gave and the hidden states before it to those after the layer, [1, T, H]."""

    @staticmethod
    def forward(
        ctx: Any,
        attended: Tensor,  # [T, heads x D]
        hidden: Tensor,  # [T, H]
        facts: LayerFacts,
        out: Tensor,
        norm: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
    ) -> Tensor:
        total, normed, rstd = kernels.norm(_product(attended, out, facts), norm, facts.second_eps, hidden)
        both = _product(normed, torch.cat((gate, up)), facts)
        ctx.save_for_backward(attended, out, norm, gate, up, down, total, normed, rstd, both)
        after = total.new_empty(1, *total.shape)  # no view: FSDP warns of modules that return one
        if facts.in_float8:
            torch.add(total, float8.product(kernels.gate(both), down), out=after[0])
        else:
            torch.addmm(total, kernels.gate(both), down.t(), out=after[0])
        return after

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        attended, out, norm, gate, up, down, total, normed, rstd, both = ctx.saved_tensors
        needs, grad = ctx.needs_input_grad, grads[0].squeeze(0).contiguous()
        d_both, opened = kernels.gate_gradient(grad @ down, both)
        d_down = grad.t() @ opened if needs[7] else None
        del opened
        d_joined = (d_both.t() @ normed).split([len(gate), len(up)]) if any(needs[5:7]) else (None,) * 2
        d_hidden, d_norm = kernels.norm_gradient(d_both @ torch.cat((gate, up)), total, norm, rstd, grad)
        del d_both
        d_out = d_hidden.t() @ attended if needs[3] else None
        d_attended = d_hidden @ out if needs[0] else None
        return d_attended, d_hidden, None, d_out, d_norm, *d_joined, d_down


class LastNorm(torch.autograd.Function):
    """The norm of what the last layer gave, [T, H]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        _, normed, rstd = kernels.norm(hidden, weight, eps)
        ctx.save_for_backward(hidden, weight, rstd)
        return normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, rstd = ctx.saved_tensors
        return *kernels.norm_gradient(grads[0].contiguous(), hidden, weight, rstd), None


def _product(rows: Tensor, weight: Tensor, facts: LayerFacts, added: Tensor | None = None) -> Tensor:
    """rows @ weight.T + added."""
    if facts.in_float8:
        found = float8.product(rows, weight)
        return found if added is None else found.add_(added)
    return rows @ weight.t() if added is None else torch.addmm(added, rows, weight.t())
