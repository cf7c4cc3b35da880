"""Autograd functions for the two halves of a plain decoder layer around its attention, and for the last norm.

Invariant: queries, keys and values are one matrix product, as are gate and up; the joined weights are made for each
pass and never kept. Cheap results (silu(gate) * up) are recomputed in backward; inputs of products are kept. Adapters
add to the products, and only trained tensors get a gradient. Only the products of the forward are in 8-bit floats;
gradients are those of the products without quantization.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slime.train.backends.fsdp.fused import kernels, matmul_kernels
from slime.train.backends.fsdp.fused.layer_parts import Adapters, LayerFacts
from slime.train.samples.packing import SharedPrompts


class ToHeads(torch.autograd.Function):
    """Hidden states to queries, keys and values; also returns the hidden states, whose two gradients are added here.

    With `shared` prompts there are hidden states of the computed tokens, and queries, keys and values of all tokens.
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
        *matrices: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        _, normed, rstd = kernels.norm(hidden, norm, facts.eps)
        added = None if q_bias is None or k_bias is None or v_bias is None else torch.cat((q_bias, k_bias, v_bias))
        rows = _product(normed, torch.cat((q, k, v)), facts, added)
        low = Adapters((q, k, v), matrices, facts.lora_scale).add(rows, normed)
        norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
        heads = kernels.rotate(rows, cos, sin, norms, facts.head_eps, facts.heads, facts.kv_heads, shared)
        ctx.save_for_backward(hidden, cos, sin, norm, q, k, v, q_norm, k_norm, normed, rstd, rows, low, *matrices)
        ctx.facts, ctx.shared = facts, shared
        return *heads, hidden

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dv, passed = grads
        hidden, cos, sin, norm, q, k, v, q_norm, k_norm, normed, rstd, rows, low, *matrices = ctx.saved_tensors
        norms = None if q_norm is None else (q_norm, k_norm)
        d_rows, d_norms = kernels.rotate_gradient((dq, dk, dv), rows, cos, sin, norms, ctx.facts.head_eps, ctx.shared)
        needs, d_normed = ctx.needs_input_grad, d_rows @ torch.cat((q, k, v))
        adapters = Adapters((q, k, v), matrices, ctx.facts.lora_scale)
        d_matrices = adapters.gradients(d_rows, normed, low, adapters.pull(d_rows, d_normed))
        d_hidden, d_norm = kernels.norm_gradient(d_normed, hidden, norm, rstd, passed)
        del d_normed
        sizes = [len(q), len(k), len(v)]
        d_weights = (d_rows.t() @ normed).split(sizes) if any(needs[6:9]) else (None,) * 3
        d_biases = d_rows.sum(0).split(sizes) if any(needs[9:12]) else (None,) * 3
        d_heads = d_norms or (None, None)
        return d_hidden, None, None, d_norm, None, None, *d_weights, *d_biases, *d_heads, *d_matrices


class FromHeads(torch.autograd.Function):
    """Attention's output and the hidden states before it to the hidden states after the layer, [1, T, H].

    `follows`: True if a backward follows; otherwise tensors that only it reads need not be written.
    """

    @staticmethod
    def forward(
        ctx: Any,
        attended: Tensor,  # [T, heads x D]
        hidden: Tensor,  # [T, H]
        follows: bool,
        facts: LayerFacts,
        norm: Tensor,
        out: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        *matrices: Tensor | None,
    ) -> Tensor:
        outward, inward, downward = _of_half(out, gate, up, down, matrices, facts)
        mixed = _product(attended, out, facts)
        low_out = outward.add(mixed, attended)
        total, normed, rstd = kernels.norm(mixed, norm, facts.second_eps, hidden)
        both, low_both = None, None
        if follows or inward or facts.in_float8 or not matmul_kernels.takes(normed, gate):
            both = _product(normed, torch.cat((gate, up)), facts)
            low_both = inward.add(both, normed)
            opened = kernels.gate(both)
        else:
            opened = matmul_kernels.product(normed, gate, up)
        after = total.new_empty(1, *total.shape)  # not a view: FSDP warns about modules that return one
        if facts.in_float8:
            torch.add(total, matmul_kernels.fp8_product(opened, down), out=after[0])
        else:
            torch.addmm(total, opened, down.t(), out=after[0])
        low_down = downward.add(after[0], opened)
        kept = (attended, norm, out, gate, up, down, total, normed, rstd, both)
        ctx.save_for_backward(*kept, low_out, low_both, low_down, *matrices)
        ctx.facts = facts
        return after

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        attended, norm, out, gate, up, down, total, normed, rstd, both, *adapted = ctx.saved_tensors
        low_out, low_both, low_down, *matrices = adapted
        outward, inward, downward = _of_half(out, gate, up, down, matrices, ctx.facts)
        needs, grad = ctx.needs_input_grad, grads[0].squeeze(0).contiguous()
        d_opened = grad @ down
        d_low = downward.pull(grad, d_opened)
        d_both, opened = kernels.gate_gradient(d_opened, both)
        del d_opened
        d_down = grad.t() @ opened if needs[8] else None
        d_matrices = downward.gradients(grad, opened, low_down, d_low)
        del opened
        d_joined = (d_both.t() @ normed).split([len(gate), len(up)]) if any(needs[6:8]) else (None,) * 2
        d_normed = d_both @ torch.cat((gate, up))
        d_matrices = inward.gradients(d_both, normed, low_both, inward.pull(d_both, d_normed)) + d_matrices
        del d_both
        d_hidden, d_norm = kernels.norm_gradient(d_normed, total, norm, rstd, grad)
        del d_normed
        d_out = d_hidden.t() @ attended if needs[5] else None
        d_attended = d_hidden @ out
        d_matrices = outward.gradients(d_hidden, attended, low_out, outward.pull(d_hidden, d_attended)) + d_matrices
        return d_attended, d_hidden, None, None, d_norm, d_out, *d_joined, d_down, *d_matrices


class LastNorm(torch.autograd.Function):
    """Norm of the last layer's output, [T, H]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        _, normed, rstd = kernels.norm(hidden, weight, eps)
        ctx.save_for_backward(hidden, weight, rstd)
        return normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, rstd = ctx.saved_tensors
        return *kernels.norm_gradient(grads[0].contiguous(), hidden, weight, rstd), None


def _of_half(
    out: Tensor, gate: Tensor, up: Tensor, down: Tensor, matrices: Sequence[Tensor | None], facts: LayerFacts
) -> tuple[Adapters, Adapters, Adapters]:
    """Adapters of the products of a layer's second half: attention's output, gate and up, down."""
    scale = facts.lora_scale
    return (
        Adapters((out,), matrices[:2], scale),
        Adapters((gate, up), matrices[2:6], scale),
        Adapters((down,), matrices[6:], scale),
    )


def _product(rows: Tensor, weight: Tensor, facts: LayerFacts, added: Tensor | None = None) -> Tensor:
    """Compute rows @ weight.T + added, in 8-bit floats if configured."""
    if facts.in_float8:
        found = matmul_kernels.fp8_product(rows, weight)
        return found if added is None else found.add_(added)
    return rows @ weight.t() if added is None else torch.addmm(added, rows, weight.t())
