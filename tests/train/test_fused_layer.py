"""Tests fused decoder layers, with kernels in Triton's interpreter, against transformers' layers."""

import pytest

from tests.rows import long
from tests.triton_interpreter import run_interpreted

pytestmark = pytest.mark.kernels

PROGRAM = r"""
import copy, sys
import numpy as np
import torch
from slime.train.backends.fsdp.attention import ATTENTION_NAME, register_packed_attention
from slime.train.backends.fsdp.fused import kernels, matmul_kernels
from slime.models.lora import Lora
from slime.train.backends.fsdp.fused.layer import FusedLayer, fuse_layers
from slime.train.backends.fsdp.lora import put_adapter
from slime.train.backends.fsdp.packed_model import PolicyModel
from slime.train.backends.fsdp.backend import recompute_layers
from slime.train.samples.packing import pack
from tests.train.tiny_training import build_model

kernels.PROGRAMS.update(norm=3, rotate=3)  # fewer than rows
matmul_kernels.ROWS = matmul_kernels.COLUMNS = matmul_kernels.DEPTH = 16
matmul_kernels.GROUP = 2
register_packed_attention()
generator = torch.Generator().manual_seed(0)
tokens = [torch.randint(0, 128, (n,), generator=generator).numpy() for n in (5, 6, 3, 4, 4, 4)]
row = pack(tokens[:3], [3, 4, 2])
samples = [np.concatenate([tokens[at], end]) for at, end in zip((1, 2, 1, 2, 1, 0), (*tokens[3:], *tokens[:3]))]
whole, shared = (pack(samples, [4, 4, 4, 5, 6, 3], share_prompts=share) for share in (False, True))
assert shared.shared is not None and len(shared.shared.first) == whole.num_tokens - 6 - 3 - 6

def passes(model, row):
    model.zero_grad()
    log_probs, entropy = PolicyModel(model)(row)
    (log_probs * torch.linspace(-1, 1, len(log_probs)) + 0.1 * entropy).sum().backward()
    return log_probs, {name: parameter.grad for name, parameter in model.named_parameters()}

def compare_scores(kind, model, other, row):
    # without a backward, once with gate and up in the kernel that has both, which every layer then takes
    with torch.no_grad():
        wanted = PolicyModel(model)(row)[0]
        torch.testing.assert_close(PolicyModel(other)(row)[0], wanted, rtol=0, atol=2e-5)
        taken, product, takes = [], matmul_kernels.product, matmul_kernels.takes
        matmul_kernels.product = lambda rows, *weights: taken.append(len(rows)) or product(rows, *weights)
        matmul_kernels.takes = lambda rows, gate: True
        torch.testing.assert_close(PolicyModel(other)(row)[0], wanted, rtol=0, atol=2e-5)
        assert len(taken) == 2, (kind, taken)
        matmul_kernels.product, matmul_kernels.takes = product, takes

def compare(kind, model, other, trained):
    (plain, wanted), (fused, got) = model, other
    for found in (wanted, got):
        assert {name for name, gradient in found.items() if gradient is not None} == set(trained), kind
    torch.testing.assert_close(fused, plain, rtol=0, atol=2e-5, msg=lambda text: f"{kind}: {text}")
    for name, gradient in wanted.items():
        if gradient is None:
            continue
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=2e-5, msg=lambda text: f"{kind} {name}: {text}")

def started(kind):
    model = build_model(kind)
    model.set_attn_implementation(ATTENTION_NAME)
    for name, parameter in model.named_parameters():  # no norm of ones, no bias of zeros
        if parameter.ndim == 1:
            with torch.no_grad():
                parameter.add_(torch.randn(parameter.shape, generator=generator) / 5)
    return model

def compare_adapters(kind, targets):
    model = started(kind)
    layers = put_adapter(model, Lora(4, 6.0, tuple(targets)), freeze=None, only_train=None)
    with torch.no_grad():
        for name in layers.shapes:
            model.get_parameter(name).copy_(torch.randn(layers.shapes[name], generator=generator) / 5)
    other = copy.deepcopy(model)
    fuse_layers(other)
    assert sum(isinstance(module, FusedLayer) for module in other.modules()) == 2, kind
    found = passes(model, whole)
    compare(f"{kind}, adapters at {targets}", found, passes(other, shared), layers.shapes)
    (switch,) = {id(module.switch): module.switch for module in other.modules() if hasattr(module, "switch")}.values()
    switch.on = False
    with torch.no_grad(), layers.off():
        off = [PolicyModel(each)(whole)[0] for each in (model, other)]
    torch.testing.assert_close(off[1], off[0], rtol=0, atol=2e-5)
    assert (off[0] - found[0]).abs().max() > 0.01

for kind in sys.argv[1:]:
    kind, *targets = kind.split(":")
    if targets:
        compare_adapters(kind, targets)
        print(kind, "right")
        continue
    model = started(kind)
    other = copy.deepcopy(model)
    fuse_layers(other)
    assert sum(isinstance(module, FusedLayer) for module in other.modules()) == 2, kind
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in other.named_parameters()]
    for each in (model, other):
        each.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    trained = dict(model.named_parameters()).keys() - {"model.layers.0.mlp.up_proj.weight"}
    compare(kind, passes(model, row), passes(other, row), trained)
    compare_scores(kind, model, other, row)
    compare(kind + ", shared prompts", passes(model, whole), passes(other, shared), trained)
    if kind == "qwen2":
        rows = (row, shared)
        once = [passes(other, each)[1] for each in rows]
        recompute_layers(other)
        for each, wanted in zip(rows, once):
            got = passes(other, each)[1]
            assert all(wanted[name] is None or torch.equal(got[name], wanted[name]) for name in wanted)
    print(kind, "right")
"""


def run(kinds: list[str]) -> None:
    assert run_interpreted(PROGRAM, *kinds).splitlines() == [f"{kind.split(':')[0]} right" for kind in kinds]


@pytest.mark.parametrize("kinds", [["qwen3"], long(["qwen2", "mistral_window"])])
def test_fused_layers_match_transformers_layers(kinds: list[str]) -> None:
    run(kinds)


@pytest.mark.parametrize("kind", [long("qwen2:q_proj:v_proj:up_proj:down_proj"), long("qwen3:all-linear")])
def test_fused_layers_with_adapters_match_transformers_layers(kind: str) -> None:
    run([kind])
