"""Layers that get LoRA adapters, their target names, and agreement between PEFT and the trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

from slime.errors import UserError
from slime.models.lora import ALL_LINEAR, Lora, choose_targets, linears_of, peft_targets
from slime.models.peft_adapter import AdapterConfig, merge_lora, write_adapter
from slime.train.backends.fsdp.lora import LoraLayers, put_adapter
from tests.train.tiny_training import SIZES, build_model

FAMILIES = ["qwen3", "llama", "qwen2", "gemma2", "phi3_longrope", "qwen3_moe", "gpt_oss", "qwen2_moe"]
SHARED_EXPERT = Qwen2MoeConfig(
    **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=48
)
ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp("models") / family
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(SHARED_EXPERT) if family == "qwen2_moe" else build_model(family)
            model.float().save_pretrained(made[family])
        return made[family]

    return make


def load(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def with_adapter(model: torch.nn.Module, lora: Lora, *, b: float = 0.0) -> LoraLayers:
    """Adds an adapter with initial values. With `b` > 0, B gets noise of this scale, so that the output changes."""
    adapter = put_adapter(model, lora, freeze=None, only_train=None)
    parameters = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, value in adapter.first_values(seed=1):
            parameters[name].copy_(value)
            if "lora_B" in name:
                parameters[name].normal_(0, b, generator=generator) if b else None
    return adapter


@pytest.mark.parametrize("family", FAMILIES)
def test_linears_of_a_folder_match_the_layers_of_the_trainer(family: str, folder: Callable) -> None:
    model = load(folder(family))
    adapter = put_adapter(model, Lora(4, 8), freeze=None, only_train=None)
    assert linears_of(folder(family)) == adapter.modules
    assert {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad} == adapter.shapes


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", "gemma2", "qwen3_moe"])
def test_linears_of_plain_families_need_only_config_json(family: str, folder: Callable, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder(family) / "config.json").read_text())
    assert linears_of(tmp_path) == linears_of(folder(family))


def test_targets_match_full_names_or_suffixes() -> None:
    linears = ["model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]
    assert choose_targets(linears, ["q_proj"], "M") == linears[1:]
    assert choose_targets(linears, ["self_attn.q_proj", "up_proj"], "M") == linears
    assert choose_targets(linears, ["model.layers.1.self_attn.q_proj"], "M") == linears[2:]
    assert choose_targets(linears, [ALL_LINEAR], "M") == linears
    with pytest.raises(UserError) as caught:
        choose_targets(linears, ["q_proj", "proj"], "the model in DIR")
    assert str(caught.value) == (
        "--lora-target-modules proj: the model in DIR has no linear layer of that name; up_proj, q_proj can have an "
        "adapter (embedding, output layer, routers and experts have none), or give all-linear"
    )


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "gate", "experts", "experts.gate_up_proj"])
def test_rejects_targets_that_cannot_have_an_adapter(target: str, folder: Callable) -> None:
    with pytest.raises(UserError, match=f"{target}: .* q_proj, k_proj, v_proj, o_proj can have an adapter"):
        choose_targets(
            put_adapter(load(folder("qwen3_moe")), Lora(4, 8), freeze=None, only_train=None).modules, [target], "it"
        )


def test_expert_modules_get_no_adapter(folder: Callable) -> None:
    """Models with custom code have such experts. The other layers of the MLP get an adapter."""
    model = load(folder("llama"))
    for layer in model.model.layers:
        layer.mlp.experts = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(2)])
    adapter = put_adapter(model, Lora(4, 8), freeze=None, only_train=None)
    assert adapter.modules == linears_of(folder("llama"))


def test_frozen_layers_get_no_adapter(folder: Callable) -> None:
    adapter = put_adapter(load(folder("qwen3")), Lora(4, 8), freeze=[r"layers\.0\.", "mlp"], only_train=None)
    assert {name.rpartition(".")[2] for name in adapter.modules} == set(ATTENTION)
    assert all(".layers.1." in name for name in adapter.modules)
    adapter = put_adapter(load(folder("qwen3")), Lora(4, 8), freeze=None, only_train=["q_proj"])
    assert list(adapter.modules) == ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]


def test_new_adapter_keeps_the_output_and_depends_only_on_the_seed(folder: Callable) -> None:
    tokens = torch.arange(6)[None]
    model = load(folder("qwen3"))
    before = model(tokens).logits
    adapter = with_adapter(model, Lora(4, 8))
    assert torch.equal(model(tokens).logits, before)
    torch.manual_seed(99)
    first, again, other = (dict(adapter.first_values(seed)) for seed in (1, 1, 2))
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], first[name.replace(".0.", ".1.")])
    assert first[name].abs().max() <= 64**-0.5 < 1.05 * first[name].abs().max()


def test_disabled_adapter_restores_the_base_model(folder: Callable) -> None:
    tokens = torch.arange(6)[None]
    model = load(folder("qwen3"))
    before = model(tokens).logits
    adapter = with_adapter(model, Lora(4, 8), b=0.3)
    assert (model(tokens).logits - before).abs().max() > 0.05
    with adapter.off():
        assert torch.equal(model(tokens).logits, before)
    assert not torch.equal(model(tokens).logits, before)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", [(ALL_LINEAR,), ("q_proj", "model.layers.1.self_attn.o_proj")])
def test_peft_and_merged_weights_match_the_trainer(
    family: str, targets: tuple[str, ...], folder: Callable, tmp_path: Path
) -> None:
    if family == "phi3_longrope" and targets != (ALL_LINEAR,):
        targets = ("qkv_proj", "model.layers.1.self_attn.o_proj")
    tokens, lora = torch.arange(7)[None], Lora(4, 6.0, targets)
    model = load(folder(family))
    adapter = with_adapter(model, lora, b=0.3)
    ours = model(tokens).logits
    parameters = dict(model.named_parameters())
    tensors = {f"base_model.model.{name}": parameters[name] for name in adapter.shapes}
    names = peft_targets(adapter.modules, adapter.linears)
    write_adapter(tmp_path, tensors, AdapterConfig(4, 6.0), base_model="base", target_modules=names)

    peft = PeftModel.from_pretrained(load(folder(family)), tmp_path)
    assert {n for n, _ in peft.named_parameters() if "lora_A" in n} == {
        f"base_model.model.{module}.lora_A.default.weight" for module in adapter.modules
    }
    torch.testing.assert_close(peft(tokens).logits, ours, atol=1e-5, rtol=1e-5)

    plain = load(folder(family))
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            module = name.removesuffix(".weight")
            if module in adapter.modules:
                matrices = (parameters[f"{module}.lora_{kind}.weight"] for kind in "AB")
                weight.copy_(merge_lora(weight, *matrices, scale=lora.scale, dtype=torch.float32))
    torch.testing.assert_close(plain(tokens).logits, ours, atol=1e-5, rtol=1e-5)


def test_peft_targets_are_short_only_if_all_layers_are_covered(folder: Callable) -> None:
    layers = put_adapter(load(folder("qwen3")), Lora(4, 8, ("q_proj", "o_proj")), freeze=None, only_train=None)
    assert peft_targets(layers.modules, layers.linears) == ["o_proj", "q_proj"]
    assert peft_targets(["model.layers.0.self_attn.q_proj"], layers.linears) == ["model.layers.0.self_attn.q_proj"]
