"""Layers packed for the CPU keep their names, weights and results."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from slime.engine.embedded.model.cpu_layers import (
    PackedLinear,
    inputs_of_linears,
    prepare_layers,
    torch_rms_norm,
)
from slime.engine.embedded.model.cpu_sampler import draw
from tests.tiny_models import SMALL

needs_mkldnn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
IDS = torch.arange(3, 15)[None]


def wide_model(model_type: str) -> nn.Module:
    torch.manual_seed(1)
    wide = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 64}
    config = AutoConfig.for_model(model_type, **{**SMALL, **wide, "initializer_range": 0.03})
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            nn.init.normal_(parameter)
    return model


@torch.inference_mode()
def logits(model: nn.Module) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def prepare_copy(model: nn.Module, *, pack: bool) -> tuple[nn.Module, Any]:
    fast = copy.deepcopy(model)
    with inputs_of_linears(fast) as inputs:
        logits(fast)
    return fast, prepare_layers(fast, inputs, pack=pack)


@needs_mkldnn
@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "gemma2"])  # head norms; biases; its own kind of norm
def test_packed_layers_match_plain_layers(model_type: str) -> None:
    model = wide_model(model_type)
    fast, _ = prepare_copy(model, pack=True)
    for _ in range(2):
        torch.testing.assert_close(logits(fast), logits(model), atol=2e-5, rtol=1e-5)
    own, plain = fast.state_dict(), model.state_dict()
    assert list(own) == list(plain)
    assert all(torch.equal(own[name], plain[name]) for name in plain)


@needs_mkldnn
def test_layers_with_the_same_input_are_packed_together() -> None:
    fast, _ = prepare_copy(wide_model("qwen2"), pack=True)
    found = {name: layer for name, layer in fast.named_modules() if isinstance(layer, PackedLinear)}
    groups: dict[int, set[str]] = {}
    for name, layer in found.items():
        if "layers.0." in name:
            groups.setdefault(id(layer._packed), set()).add(name.rsplit(".", 1)[1])
    together = [{"q_proj", "k_proj", "v_proj"}, {"o_proj"}, {"gate_proj", "up_proj"}, {"down_proj"}]
    assert list(groups.values()) == together
    x = torch.randn(1, 5, 512)
    gate, up = (found[f"model.layers.0.mlp.{name}_proj"] for name in ("gate", "up"))
    with torch.inference_mode():
        torch.testing.assert_close(gate(x), nn.functional.linear(x, gate.weight), atol=2e-5, rtol=0)
        other = x + 1  # the result cached for x is not used for another input
        torch.testing.assert_close(up(other), nn.functional.linear(other, up.weight), atol=2e-5, rtol=0)


@needs_mkldnn
def test_weight_changes_take_effect_after_forget() -> None:
    model = wide_model("qwen2")
    fast, packed = prepare_copy(model, pack=True)
    before = logits(fast)
    with torch.no_grad():
        for target, source in zip(fast.state_dict().values(), model.state_dict().values(), strict=True):
            source.mul_(1.5)
            target.copy_(source)
    for weights in packed:
        weights.forget()
    torch.testing.assert_close(logits(fast), logits(model), atol=5e-5, rtol=1e-5)
    assert not torch.allclose(logits(fast), before, atol=1e-2)


def test_norms_are_replaced_only_if_bit_exact() -> None:
    model, gemma = wide_model("qwen3"), wide_model("gemma2")
    norms = [layer for layer in model.modules() if type(layer).__name__ == "Qwen3RMSNorm"]
    assert norms
    for layer in norms:
        fast = torch_rms_norm(layer)
        assert fast is not None
        x = torch.randn(7, 3, fast.weight.numel()) * 50
        assert torch.equal(fast(x), layer(x))
    others = [layer for layer in gemma.modules() if type(layer).__name__ == "Gemma2RMSNorm"]  # multiplies by 1 + weight
    assert others
    assert all(torch_rms_norm(layer) is None for layer in others)
    fast_gemma, _ = prepare_copy(gemma, pack=False)
    torch.testing.assert_close(logits(fast_gemma), logits(gemma), atol=2e-5, rtol=1e-5)


def test_draw_defaults_match_unit_temperature_and_no_greedy_rows() -> None:
    torch.manual_seed(0)
    values, uniform = torch.randn(64, 300), torch.rand(64)
    want = draw(values, torch.ones(64), uniform, torch.zeros(64, dtype=torch.bool))
    found = draw(values, None, uniform, None)
    assert torch.equal(found[0], want[0])
    assert torch.equal(found[1], want[1])
