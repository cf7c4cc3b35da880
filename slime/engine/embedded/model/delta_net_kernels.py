"""CUDA ops for a decode step of a gated delta net: one token per sequence, with in-place state updates.

Both are custom ops; if the states were written outside of one, torch.compile would copy all states at every step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _step_kernel(
    STATE, ROWS, Q, K, V, DECAY, BETA, OUT, ss_r, ss_h, heads,
    DK: tl.constexpr, DKP: tl.constexpr, DV: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(0), tl.program_id(1)
    d, n = tl.arange(0, DKP), tl.program_id(2) * N + tl.arange(0, N)
    at = b * heads + h
    places = STATE + tl.load(ROWS + b) * ss_r + h * ss_h + d[:, None] * DV + n[None, :]
    inside = (d[:, None] < DK) & (n[None, :] < DV)
    state = tl.load(places, mask=inside, other=0.0) * tl.exp(tl.load(DECAY + at))
    k = tl.load(K + at * DK + d, mask=d < DK, other=0.0)
    q = tl.load(Q + at * DK + d, mask=d < DK, other=0.0)
    v = tl.load(V + at * DV + n, mask=n < DV, other=0.0)
    correction = (v - tl.sum(state * k[:, None], 0)) * tl.load(BETA + at)
    state += k[:, None] * correction[None, :]
    tl.store(places, state, mask=inside)
    tl.store(OUT + at * DV + n, tl.sum(state * q[:, None], 0), mask=n < DV)


@torch.library.custom_op("slime::delta_step", mutates_args=("states",))
def step(
    states: torch.Tensor,
    rows: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
) -> torch.Tensor:
    """Apply the delta rule to `rows` of `states [rows, h, K, V]`: q, k `[b, h, K]`, v `[b, h, V]`, all in fp32."""
    b, heads, key_dim = q.shape
    value_dim = v.shape[2]
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    columns = min(32, triton.next_power_of_2(value_dim))
    _step_kernel[(b, heads, triton.cdiv(value_dim, columns))](
        states, rows, q.contiguous(), k.contiguous(), v.contiguous(), decay.contiguous(), beta.contiguous(), out,
        states.stride(0), states.stride(1), heads,
        DK=key_dim, DKP=triton.next_power_of_2(key_dim), DV=value_dim, N=columns, num_warps=4,
    )  # fmt: skip
    return out


@step.register_fake
def _(states, rows, q, k, v, decay, beta):
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@torch.library.custom_op("slime::convolution_step", mutates_args=("inputs",))
def convolve(inputs: torch.Tensor, rows: torch.Tensor, fresh: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the newest output `[b, channels]` and shift `rows` of `inputs [rows, kernel - 1, channels]` by one."""
    window = torch.cat([inputs[rows], fresh[:, None]], 1)
    inputs[rows] = window[:, 1:]
    return (window * weight.t()).sum(1)


@convolve.register_fake
def _(inputs, rows, fresh, weight):
    return torch.empty_like(fresh)
