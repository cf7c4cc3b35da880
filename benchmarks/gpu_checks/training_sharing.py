"""`--share-prompts` in training: sums over copies against torch's, log-probs and gradients against whole sequences."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from gpu_checks.training_layer import SIZES, apart, passes
from slime.train.backends.fsdp.attention import ATTENTION_NAME, register_packed_attention
from slime.train.backends.fsdp.fused.layer import fuse_layers
from slime.train.backends.fsdp.shared_prompt_ops import sum_of_copies
from slime.train.samples.packing import PackedRow, pack

_RESPONSES = {"equal": (64,) * 12, "ragged": (300, 7, 129, 64, 65, 1, 30, 2, 200, 11, 90, 90)}


def checks() -> Iterator[tuple[str, float, float]]:
    for name in _RESPONSES:
        yield from _sums(name)
        yield from _steps(name)


def _row(name: str, *, share: bool) -> PackedRow:
    """Three prompts, four answers each."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 1000, 150) for _ in range(3)]
    tokens = [np.concatenate([prompts[i // 4], rng.integers(0, 1000, n)]) for i, n in enumerate(_RESPONSES[name])]
    return pack(tokens, _RESPONSES[name], torch.device("cuda"), share_prompts=share)


def _sums(name: str) -> Iterator[tuple[str, float, float]]:
    torch.manual_seed(0)
    shared = _row(name, share=True).shared
    assert shared is not None
    for width, dtype, bound in ((2048, torch.bfloat16, 4e-3), (1100, torch.float32, 1e-6)):
        grad = torch.randn(len(shared.place), width, device="cuda").to(dtype)
        wanted = torch.zeros(len(shared.first), width, device="cuda").index_add_(0, shared.place, grad.float())
        what = f"sums of copies, {name}, {width} x {str(dtype).removeprefix('torch.')}"
        yield what, apart(sum_of_copies(grad, shared).float(), wanted), bound


def _steps(name: str) -> Iterator[tuple[str, float, float]]:
    register_packed_attention()
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, head_dim=128)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=ATTENTION_NAME).to("cuda")
    fuse_layers(model)
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 4e-2)):
        model.to(dtype)
        both = []
        for share in (False, True):
            model.zero_grad()
            both.append(passes(model, _row(name, share=share)))
        (wanted_values, wanted), (values, found) = both
        kind = f"{name}, {str(dtype).removeprefix('torch.')}"
        yield f"log-probs, {kind}", (values - wanted_values).abs().mean().item(), bound
        yield f"gradients, {kind}, worst", max(apart(found[part], wanted[part]) for part in wanted), bound
