"""Fused decoder layers, their kernels run by Triton's interpreter, against transformers' own."""

import os
import subprocess
import sys

PROGRAM = r"""
import copy, sys
import torch
from slime.train.backends.fsdp.attention import ATTENTION_NAME, register_packed_attention
from slime.train.backends.fsdp.fused import kernels
from slime.train.backends.fsdp.fused.layer import FusedLayer, fuse_layers
from slime.train.backends.fsdp.packed_model import PolicyModel
from slime.train.backends.fsdp.recompute import recompute_layers
from slime.train.samples.packing import pack
from tests.train.tiny_training import build_model

kernels.PROGRAMS.update(norm=3, rotate=3)  # fewer than rows
register_packed_attention()
generator = torch.Generator().manual_seed(0)
tokens = [torch.randint(0, 128, (n,), generator=generator).numpy() for n in (5, 6, 3)]
row = pack(tokens, [3, 4, 2])
for kind in sys.argv[1:]:
    model = build_model(kind)
    model.set_attn_implementation(ATTENTION_NAME)
    for name, parameter in model.named_parameters():  # no norm of ones, no bias of zeros
        if parameter.ndim == 1:
            with torch.no_grad():
                parameter.add_(torch.randn(parameter.shape, generator=generator) / 5)
    other = copy.deepcopy(model)
    fuse_layers(other)
    assert sum(isinstance(module, FusedLayer) for module in other.modules()) == 2, kind
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in other.named_parameters()]
    found = []
    for each in (model, other):
        each.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
        policy = PolicyModel(each)
        log_probs, entropy = policy(row)
        (log_probs * torch.linspace(-1, 1, len(log_probs)) + 0.1 * entropy).sum().backward()
        found.append((log_probs, {name: parameter.grad for name, parameter in each.named_parameters()}))
    (plain, wanted), (fused, got) = found
    torch.testing.assert_close(fused, plain, rtol=0, atol=2e-5, msg=lambda text: f"{kind}: {text}")
    for name, gradient in wanted.items():
        if gradient is None:
            assert name == "model.layers.0.mlp.up_proj.weight" and got[name] is None, name
            continue
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=2e-5, msg=lambda text: f"{kind} {name}: {text}")
    if kind == "qwen2":
        recompute_layers(other)
        other.zero_grad()
        log_probs, entropy = policy(row)
        (log_probs * torch.linspace(-1, 1, len(log_probs)) + 0.1 * entropy).sum().backward()
        for name, parameter in other.named_parameters():
            assert got[name] is None or torch.equal(parameter.grad, got[name]), name
    print(kind, "right")
"""


def test_values_and_gradients_are_those_of_the_layers_they_replace() -> None:
    kinds = ["qwen3", "qwen2", "mistral_window"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *kinds], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[:-1] == [f"{kind} right" for kind in kinds]
