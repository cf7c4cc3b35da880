"""Tests the choice of kernels for gated delta nets and the rejected settings."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from slime.algorithms.delta_rule import Chunks, gated_delta_rule
from slime.errors import UserError
from slime.train.backends.delta_kernels import PackageKernels, TorchKernels, check_delta_kernels, delta_kernels
from slime.train.topology import Ranks
from tests.train.test_packed import packed_policy

LENGTHS = (3, 70)


@pytest.mark.parametrize("name", ["fla", "flashqla"])
def test_rejects_gdn_backend_that_is_not_installed(name) -> None:
    with pytest.raises(UserError, match=f"--qwen-gdn-backend {name} needs the package"):
        check_delta_kernels(name)
    with pytest.raises(UserError, match="not installed"):
        packed_policy("qwen3_5", gdn_backend=name)
    packed_policy("qwen3", gdn_backend=name)  # qwen3 has no delta nets


def test_rejects_context_size_that_does_not_divide_key_heads() -> None:
    policy = packed_policy("qwen3_5")
    with pytest.raises(UserError, match=r"size 3 does not divide the 4 key heads .* use one of 1, 2, 4"):
        policy.set_context_ranks(Ranks(0, 3, torch.device("cpu")))


def test_defaults_to_torch_kernels_without_gpu() -> None:
    check_delta_kernels(None)
    assert isinstance(delta_kernels(None, LENGTHS, torch.device("cpu")), TorchKernels)


def test_package_kernels_receive_cu_seqlens(monkeypatch) -> None:
    """The call is flash-linear-attention's: tensors of [1, T, heads, D], key heads repeated to the number of heads."""

    def rule(query, key, value, g, beta, *, use_qk_l2norm_in_kernel, cu_seqlens):
        assert use_qk_l2norm_in_kernel
        assert cu_seqlens.tolist() == [0, 3, 73]
        assert query.shape == key.shape == (1, 73, 4, 8)
        assert value.shape == (1, 73, 4, 6)
        chunks = Chunks.of(cu_seqlens.diff().tolist(), query.device)
        return gated_delta_rule(query[0], key[0], value[0], g[0], beta[0], chunks)[None], None

    module = types.ModuleType("flash_qla")
    module.chunk_gated_delta_rule = rule
    monkeypatch.setitem(sys.modules, "flash_qla", module)
    generator = torch.Generator().manual_seed(0)
    shapes = [(73, 2, 8), (73, 2, 8), (73, 4, 6), (73, 4), (73, 4)]
    q, k, v, decay, beta = (torch.rand(*shape, generator=generator) for shape in shapes)
    package = PackageKernels("flashqla", LENGTHS, torch.device("cpu"))
    own = TorchKernels(LENGTHS, torch.device("cpu"))
    torch.testing.assert_close(package.rule(q, k, v, -decay, beta), own.rule(q, k, v, -decay, beta))
    mixed, weight = torch.rand(73, 6, generator=generator), torch.rand(6, 4, generator=generator)
    assert torch.equal(package.conv(mixed, weight, None), own.conv(mixed, weight, None))
