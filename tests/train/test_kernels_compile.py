"""Tests that Triton compiles the trainer's kernels."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from triton.runtime.jit import JITFunction

from slime.algorithms import fused_head, logprobs
from slime.algorithms.logit_transform import LogitTransform
from slime.train.backends.fsdp.fused import kernels, matmul_kernels
from tests.gpu_compiler import compile_launches
from tests.rows import long
from tests.train.test_shared_prompts import make_row

pytestmark = pytest.mark.kernels


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return compile_launches(monkeypatch, tmp_path_factory)


@pytest.mark.parametrize("has_norm", [True, False], ids=["normed heads", "plain heads"])
@pytest.mark.parametrize("share", [True, False], ids=["shared prompts", "whole sequences"])
def test_rotary_kernels_compile(share: bool, has_norm: bool, compiled: list[str]) -> None:
    shared = make_row(share=share).shared
    assert (shared is not None) == share
    tokens = 65 if shared is None else len(shared.first)
    rows = torch.zeros(tokens, 8 * 16, dtype=torch.bfloat16)
    cos = torch.zeros(tokens, 16, dtype=torch.bfloat16)
    norms = (cos[0], cos[0]) if has_norm else None
    heads = kernels.rotate(rows, cos, cos, norms, 1e-6, 4, 2, shared)
    assert [tuple(states.shape) for states in heads] == [(65, 4, 16), (65, 2, 16), (65, 2, 16)]
    kernels.rotate_gradient(heads, rows, cos, cos, norms, 1e-6, shared)
    assert compiled == ["_rotate_forward", "_rotate_backward"]


def test_norm_gate_and_quantize_kernels_compile(compiled: list[str]) -> None:
    rows = torch.zeros(5, 48, dtype=torch.bfloat16)
    statistics = torch.zeros(5)
    for more in (None, rows):
        kernels.norm(rows, rows[0], 1e-6, more)
        kernels.norm_gradient(rows, rows, rows[0], statistics, more)
    kernels.gate_gradient(kernels.gate(rows), rows)
    matmul_kernels.quantize(rows)
    assert compiled == [*["_norm_forward", "_norm_backward"] * 2, "_gate_forward", "_gate_backward", "_quantize"]


def test_gated_product_kernel_compiles(compiled: list[str]) -> None:
    rows, weight = (torch.zeros(count, 128, dtype=torch.bfloat16) for count in (5, 192))
    assert matmul_kernels.product(rows, weight, weight).shape == (5, 192)
    assert compiled == ["_gated_tile"]


def test_copy_kernels_compile(compiled: list[str]) -> None:
    shared = make_row(share=True).shared
    assert shared is not None
    for dtype in (torch.bfloat16, torch.float32):
        total = kernels.add_copies(torch.zeros(65, 3, 16, dtype=dtype), shared.copies, shared.starts)
        kernels.put_first(total, shared.place, shared.first)
    assert compiled == ["_add_copies", "_put_first"] * 2


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_logit_statistics_kernels_compile(
    softcap: float | None, with_entropy: bool, has_bias: bool, compiled: list[str]
) -> None:
    raw, targets = torch.zeros(3, 100), torch.zeros(3, dtype=torch.int64)
    bias = raw[0] if has_bias else None
    transform = LogitTransform(scale=1.5, softcap=softcap, temperature=0.8)
    normaliser, _, entropy = fused_head.softmax_stats(raw, bias, targets, transform, with_entropy=with_entropy)
    toward = None if entropy is None else (normaliser, entropy)
    out = torch.empty(3, 100, dtype=torch.bfloat16)
    fused_head.logits_gradient(raw, bias, targets, normaliser, normaliser, toward, transform, out=out)
    assert compiled == ["_stats", "_gradient"]


@pytest.mark.parametrize(
    ("softcap", "with_entropy", "vocab"),
    [
        (None, True, 300),
        (30.0, False, 256),
        *(
            long(softcap, with_entropy, vocab)
            for softcap in (None, 30.0)
            for with_entropy in (True, False)
            for vocab in (256, 300)
            if (softcap, with_entropy, vocab) not in ((None, True, 300), (30.0, False, 256))
        ),
    ],
)
def test_projected_statistics_kernels_compile(
    softcap: float | None, with_entropy: bool, vocab: int, compiled: list[str]
) -> None:
    hidden, weight = (torch.zeros(rows, 128, dtype=torch.bfloat16) for rows in (5, vocab))
    bias = weight[:, 0].contiguous() if softcap else None
    transform = LogitTransform(scale=1.5, softcap=softcap, temperature=0.8)
    targets = torch.zeros(5, dtype=torch.int64)
    fused_head.projected_stats(hidden, weight, bias, targets, transform, with_entropy=with_entropy)
    assert compiled == ["_tile_stats", "_join_tiles"]
    assert fused_head.COLUMNS == logprobs.FUSED_SHARE, "so many rows take the memory of one row of logits"


@pytest.mark.parametrize("module", [kernels, fused_head, matmul_kernels])
def test_kernels_do_not_specialize_on_row_count(module: ModuleType) -> None:
    made = [kernel for kernel in vars(module).values() if isinstance(kernel, JITFunction)]
    assert made
    counts = [p for kernel in made for p in kernel.params if p.name in ("rows", "tokens")]
    assert all(parameter.do_not_specialize for parameter in counts), counts
