"""LoRA adapters on disk and merged into weights, compared with PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slime.models.peft_adapter import (
    CONFIG_NAME,
    TENSORS_NAME,
    AdapterConfig,
    BadAdapter,
    merge_lora,
    read_adapter,
    tensor_names,
    write_adapter,
)
from tests.tiny_models import make_model_folder

MODULES = {"model.layers.0.self_attn.q_proj": (64, 64), "model.layers.1.mlp.down_proj": (64, 96)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "qwen3")


def random_tensors(rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (out, size) in MODULES.items():
        name_a, name_b = tensor_names(module)
        tensors[name_a] = torch.randn(rank, size, generator=generator)
        tensors[name_b] = torch.randn(out, rank, generator=generator)
    return tensors


def write(folder: Path, facts: AdapterConfig, tensors: dict[str, torch.Tensor]) -> Path:
    write_adapter(folder, tensors, facts, base_model="base", target_modules=sorted(MODULES))
    return folder


def test_peft_reads_written_adapters_and_merges_to_the_same_weights(folder: Path, tmp_path: Path) -> None:
    adapter = write(tmp_path / "adapter", AdapterConfig(4, 6.0), random_tensors(4))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = read_adapter(adapter)
    reference = PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()
    assert found.weight_shapes == {f"{module}.weight": shape for module, shape in MODULES.items()}
    changed = [name for name, tensor in reference.items() if not torch.equal(tensor, base[name])]
    assert sorted(changed) == sorted(found.weight_shapes)
    for module, (a, b) in found.pairs.items():
        own = merge_lora(base[f"{module}.weight"], a, b, scale=found.facts.scale, dtype=torch.float32)
        torch.testing.assert_close(own, reference[f"{module}.weight"], atol=1e-6, rtol=1e-6)


def test_reads_adapters_saved_by_peft(folder: Path, tmp_path: Path) -> None:
    config = LoraConfig(r=2, lora_alpha=3, target_modules=["k_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config)
    model.save_pretrained(str(tmp_path))
    found = read_adapter(tmp_path)
    assert (found.facts.rank, found.facts.scale, found.facts.base_dtype) == (2, 1.5, None)
    assert sorted(found.pairs) == [f"model.layers.{layer}.self_attn.k_proj" for layer in range(2)]


def test_merge_is_computed_in_float32_and_rounded_once() -> None:
    """Base 1, update 2**-9: the sum is 1 in bfloat16. A sum in float32 keeps what bfloat16 can represent."""
    base = torch.ones(1, 1, dtype=torch.bfloat16)
    a, b = torch.full((1, 1), 2.0**-4), torch.full((1, 1), 2.0**-5)
    assert merge_lora(base, a, b, scale=1.0, dtype=torch.float32).item() == 1 + 2.0**-9
    assert merge_lora(base, a, b, scale=4.0, dtype=torch.bfloat16).item() == 1 + 2.0**-7


def test_base_dtype_is_stored_with_the_adapter(tmp_path: Path) -> None:
    found = read_adapter(write(tmp_path, AdapterConfig(4, 8.0, torch.bfloat16), random_tensors(4)))
    assert found.facts == AdapterConfig(4, 8.0, torch.bfloat16)
    assert AdapterConfig.from_dict(found.facts.to_dict()) == found.facts
    for name, tensor in random_tensors(4).items():
        module, half = name.removeprefix("base_model.model.").rsplit(".lora_", 1)
        assert torch.equal(found.pairs[module]["AB".index(half[0])], tensor)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"use_dora": True}, "use_dora True: only plain LoRA"),
        ({"use_rslora": True}, "use_rslora True: only plain LoRA"),
        ({"bias": "all"}, "bias 'all': only plain LoRA"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern"),
        ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
        ({"r": 0}, "r must be an integer above 0, not 0"),
        ({"r": 3}, "not a pair of rank 3"),
        ({"lora_alpha": "x"}, "lora_alpha must be a number"),
    ],
)
def test_rejects_unsupported_adapter_configs(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    path = write(tmp_path, AdapterConfig(4, 8.0), random_tensors(4)) / CONFIG_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(BadAdapter, match=reason):
        read_adapter(tmp_path)


def test_rejects_invalid_adapter_tensors(tmp_path: Path) -> None:
    write(tmp_path, AdapterConfig(4, 8.0), random_tensors(4))
    path = tmp_path / TENSORS_NAME
    tensors = load_file(path)
    half = {name: tensor for name, tensor in tensors.items() if not name.endswith("q_proj.lora_B.weight")}
    save_file(half, path)
    with pytest.raises(BadAdapter, match=r"lora_A and no lora_B for model\.layers\.0\.self_attn\.q_proj"):
        read_adapter(tmp_path)
    save_file({"model.norm.weight": torch.ones(3)}, path)
    with pytest.raises(BadAdapter, match=r"'model\.norm\.weight' is not a LoRA tensor"):
        read_adapter(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BadAdapter, match="holds no readable LoRA adapter"):
        read_adapter(tmp_path)
