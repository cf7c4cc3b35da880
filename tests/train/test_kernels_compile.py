"""The trainer's kernels through Triton's compiler, for a GPU that need not be there.

The interpreter, with which other tests compare numbers, is Python: a branch that no launch takes may be wrong there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from slime.algorithms import head_kernels
from slime.algorithms.logit_transform import LogitTransform
from slime.train.backends.fsdp import copy_kernels
from slime.train.backends.fsdp.fused import float8, kernels
from tests.train.test_shared_prompts import make_row

HOPPER = GPUTarget("cuda", 90, 32)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Launches compile and run nothing: the names of those that did."""
    names: list[str] = []

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False))
        given |= {name: keywords.pop(name) for name in kernel.arg_names if name in keywords}
        fixed = {p.name: given[p.name] for p in kernel.params if p.is_constexpr or given[p.name] is None}
        signature = {n: "constexpr" if n in fixed else mangle_type(given[n]) for n in kernel.arg_names}
        places = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
        triton.compile(ASTSource(kernel, signature, places), target=HOPPER, options=keywords)
        names.append(kernel.fn.__name__)

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return names


@pytest.mark.parametrize("has_norm", [True, False], ids=["normed heads", "plain heads"])
@pytest.mark.parametrize("share", [True, False], ids=["shared prompts", "whole sequences"])
def test_rotations(share: bool, has_norm: bool, compiled: list[str]) -> None:
    shared, tokens = make_row(share=share).shared, 40 if share else 65
    assert (shared is not None) == share
    rows = torch.zeros(tokens, 8 * 16, dtype=torch.bfloat16)
    cos = torch.zeros(tokens, 16, dtype=torch.bfloat16)
    norms = (cos[0], cos[0]) if has_norm else None
    heads = kernels.rotate(rows, cos, cos, norms, 1e-6, 4, 2, shared)
    assert [tuple(states.shape) for states in heads] == [(65, 4, 16), (65, 2, 16), (65, 2, 16)]
    kernels.rotate_gradient(heads, rows, cos, cos, norms, 1e-6, shared)
    assert compiled == ["_rotate_forward", "_rotate_backward"]


def test_what_lies_between_products(compiled: list[str]) -> None:
    rows = torch.zeros(5, 48, dtype=torch.bfloat16)
    statistics = torch.zeros(5)
    for more in (None, rows):
        kernels.norm(rows, rows[0], 1e-6, more)
        kernels.norm_gradient(rows, rows, rows[0], statistics, more)
    kernels.gate_gradient(kernels.gate(rows), rows)
    float8.quantize(rows)
    assert compiled == [*["_norm_forward", "_norm_backward"] * 2, "_gate_forward", "_gate_backward", "_quantize"]


def test_copies(compiled: list[str]) -> None:
    shared = make_row(share=True).shared
    assert shared is not None
    for dtype in (torch.bfloat16, torch.float32):
        total = copy_kernels.add_copies(torch.zeros(65, 3, 16, dtype=dtype), shared.copies, shared.starts)
        copy_kernels.put_first(total, shared.place, shared.first)
    assert compiled == ["_add_copies", "_put_first"] * 2


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_statistics_of_logits(softcap: float | None, with_entropy: bool, has_bias: bool, compiled: list[str]) -> None:
    raw, targets = torch.zeros(3, 100), torch.zeros(3, dtype=torch.int64)
    bias = raw[0] if has_bias else None
    transform = LogitTransform(scale=1.5, softcap=softcap, temperature=0.8)
    normaliser, _, entropy = head_kernels.softmax_stats(raw, bias, targets, transform, with_entropy=with_entropy)
    toward = None if entropy is None else (normaliser, entropy)
    out = torch.empty(3, 100, dtype=torch.bfloat16)
    head_kernels.logits_gradient(raw, bias, targets, normaliser, normaliser, toward, transform, out=out)
    assert compiled == ["_stats", "_gradient"]
