"""Experts in one product for every routing, against each expert on its own in float32; shapes of a 30B-A3B."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from slime.engine.embedded.model.expert_kernels import multiply_experts

_EXPERTS, _TOPK, _HIDDEN, _INNER = 128, 8, 2048, 768


def checks() -> Iterator[tuple[str, float, float]]:
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        module = _module(dtype)
        for tokens in (1, 3, 16, 256, 2048):
            if dtype == torch.float32 and tokens > 16:
                continue
            name = f"{str(dtype).removeprefix('torch.')}, {tokens} tokens"
            yield name, _error(module, tokens, dtype), bound


def _module(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    shapes = {"gate_up_proj": (_EXPERTS, 2 * _INNER, _HIDDEN), "down_proj": (_EXPERTS, _HIDDEN, _INNER)}
    weights = {name: (torch.randn(shape, device="cuda") * 0.03).to(dtype) for name, shape in shapes.items()}
    facts = {"num_experts": _EXPERTS, "has_bias": False, "is_transposed": False, "has_gate": True}
    return SimpleNamespace(**weights, **facts, _apply_gate=_gated)


def _gated(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@torch.inference_mode()
def _error(module: Any, tokens: int, dtype: torch.dtype) -> float:
    hidden = torch.randn(tokens, _HIDDEN, device="cuda").to(dtype)
    weights, index = torch.randn(tokens, _EXPERTS, device="cuda").softmax(-1).topk(_TOPK, -1)
    found = multiply_experts(module, hidden, index, weights.to(dtype)).float()
    wanted = torch.zeros_like(found)
    for expert in range(_EXPERTS):
        token, at = (index == expert).nonzero(as_tuple=True)
        inner = _gated(hidden[token].float() @ module.gate_up_proj[expert].float().t())
        wanted.index_add_(0, token, (inner @ module.down_proj[expert].float().t()) * weights[token, at, None])
    return ((found - wanted).abs().max() / wanted.abs().max()).item()
