"""A LoRA adapter in the embedded engine: weights equal the base weights with the adapter merged, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime.engine.embedded.engine import EngineCore
from slime.engine.embedded.errors import BadRequest, Conflict
from slime.engine.embedded.options import parse_options
from slime.engine.embedded.weights.process_groups import AnnouncedBucket
from slime.models.peft_adapter import AdapterConfig, merge_lora, tensor_names, write_adapter
from tests.engine.conftest import EngineProcess
from tests.tiny_models import make_model_folder

FACTS = AdapterConfig(4, 8.0, torch.float32)
ATTENTION = {f"model.layers.{layer}.self_attn.{name}": (out, 64)
             for layer in range(2) for name, out in (("q_proj", 64), ("k_proj", 32))}  # fmt: skip
DOWN = {f"model.layers.{layer}.mlp.down_proj": (64, 96) for layer in range(2)}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

Weights = dict[str, torch.Tensor]


def loaded(folder: Path, *options: str) -> EngineCore:
    core = EngineCore(parse_options(["--model-path", str(folder), *options]), on_death=lambda error: None)
    core.load("cpu")
    return core


def weights(core: EngineCore) -> Weights:
    return {name: tensor.clone() for name, tensor in core.weights.views.readable().items()}


def folder_weights(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict())


def random_pairs(modules: Mapping[str, tuple[int, int]], seed: int, rank: int = FACTS.rank) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    tensors: Weights = {}
    for module, (out, size) in modules.items():
        a, b = tensor_names(module)
        tensors |= {a: torch.randn(rank, size, generator=generator), b: torch.randn(out, rank, generator=generator)}
    return tensors


def save_adapter(path: Path, tensors: Weights, facts: AdapterConfig = FACTS) -> str:
    write_adapter(path, tensors, facts, base_model="base", target_modules=["q_proj"], sync=False)
    return str(path)


def expected(base: Weights, tensors: Weights, dtype: torch.dtype, facts: AdapterConfig = FACTS) -> Weights:
    """The weights that the trainer merges: computed in float32 and rounded once to `dtype`."""
    found = {name: tensor.to(dtype) for name, tensor in base.items()}
    for name in tensors:
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            a, b = (tensors[one] for one in tensor_names(module))
            weight = f"{module}.weight"
            found[weight] = merge_lora(base[weight], a, b, scale=facts.scale, dtype=dtype)
    return found


def assert_same(found: Weights, wanted: Weights) -> None:
    assert found.keys() >= wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_adapters_are_merged_into_the_base_weights_in_turn(qwen3_folder: Path, tmp_path: Path) -> None:
    """The second adapter is for other layers: the layers of the first return to the base weights."""
    core, base = loaded(qwen3_folder), folder_weights(qwen3_folder)
    first, second = random_pairs(ATTENTION, 1), random_pairs(DOWN, 2)
    copied = core.weights.load_adapter("a", save_adapter(tmp_path / "1", first), "1", flush=True)
    assert copied == sum(tensor.nbytes for tensor in first.values())
    assert core.weight_version == "1"
    assert_same(weights(core), expected(base, first, torch.float32))
    core.weights.load_adapter("a", save_adapter(tmp_path / "2", second), "2", flush=True)
    assert_same(weights(core), expected(base, second, torch.float32))
    core.weights.unload_adapter("a", "3", flush=True)
    assert_same(weights(core), base)
    assert core.weight_version == "3"


@pytest.mark.parametrize(
    ("trained_in", "served_in"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
)
def test_adapter_is_merged_in_the_trainer_dtype(
    qwen3_folder: Path, tmp_path: Path, trained_in: str, served_in: str
) -> None:
    """Weights equal a full send by the trainer: merged in its dtype, then cast to the engine's; untouched ones too."""
    core, dtype = loaded(qwen3_folder, "--dtype", served_in), getattr(torch, trained_in)
    base, facts = folder_weights(qwen3_folder, dtype), AdapterConfig(4, 3.0, dtype)
    for version, modules in enumerate((ATTENTION, DOWN)):
        tensors = random_pairs(modules, version)
        core.weights.load_adapter("a", save_adapter(tmp_path / str(version), tensors, facts), str(version), flush=True)
        assert_same(weights(core), expected(base, tensors, getattr(torch, served_in), facts))
    core.weights.unload_adapter("a", "2", flush=True)
    assert_same(weights(core), folder_weights(qwen3_folder, getattr(torch, served_in)))


def test_adapter_of_another_base_dtype_replaces_the_previous_one(qwen3_folder: Path, tmp_path: Path) -> None:
    core, tensors = loaded(qwen3_folder), random_pairs(ATTENTION, 1)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        facts = AdapterConfig(4, 8.0, dtype)
        core.weights.load_adapter("a", save_adapter(tmp_path, tensors, facts), "1", flush=True)
        assert_same(weights(core), expected(folder_weights(qwen3_folder, dtype), tensors, torch.float32, facts))


def test_full_update_unloads_the_adapter_and_the_next_uses_the_base(qwen3_folder: Path, tmp_path: Path) -> None:
    core, base = loaded(qwen3_folder), folder_weights(qwen3_folder)
    adapter = random_pairs(ATTENTION, 1)
    folder = save_adapter(tmp_path / "1", adapter)
    core.weights.load_adapter("a", folder, "1", flush=True)
    other = make_model_folder(tmp_path / "other", seed=3)
    core.weights.update_from_folder(str(other), "2", flush=True)
    assert_same(weights(core), folder_weights(other))
    with pytest.raises(BadRequest, match="no adapter 'a' is loaded"):
        core.weights.unload_adapter("a", "x", flush=True)
    core.weights.load_adapter("a", folder, "3", flush=True)
    assert_same(weights(core), expected(base, adapter, torch.float32))


def test_loading_an_adapter_clears_stale_weights(qwen3_folder: Path, tmp_path: Path) -> None:
    core, base = loaded(qwen3_folder), folder_weights(qwen3_folder)
    adapter = random_pairs(ATTENTION, 1)
    core.weights.load_adapter("a", save_adapter(tmp_path, adapter), "1", flush=True)
    with torch.no_grad():
        core.weights.views.model.get_parameter("model.norm.weight").add_(1.0)
    core.weights.mark_stale("somebody wrote to a norm")
    core.weights.load_adapter("a", str(tmp_path), "2", flush=True)
    assert (core.weights.stale, core.weight_version) == (None, "2")
    assert_same(weights(core), expected(base, adapter, torch.float32))


def test_adapter_of_one_expert_is_merged_and_unloaded(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model", "qwen3_moe", **EXPERTS)
    core = loaded(folder)
    before = weights(core)
    adapter = random_pairs({"model.layers.0.mlp.experts.2.down_proj": (64, 32), **ATTENTION}, 1)
    core.weights.load_adapter("a", save_adapter(tmp_path / "a", adapter), "1", flush=True)
    assert_same(weights(core), {n: t for n, t in expected(before, adapter, torch.float32).items() if "experts.2" in n
                                or ".experts." not in n})  # fmt: skip
    core.weights.unload_adapter("a", "2", flush=True)
    assert_same(weights(core), before)


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ({"model.layers.7.self_attn.q_proj": (64, 64)}, r"model\.layers\.7\.self_attn\.q_proj\.weight.* does not have"),
        ({"model.layers.0.self_attn.q_proj": (64, 32)}, r"has shape \(64, 32\) in the adapter but \(64, 64\)"),
    ],
)
def test_rejected_adapter_changes_nothing(
    qwen3_folder: Path, tmp_path: Path, modules: dict[str, tuple[int, int]], reason: str
) -> None:
    core = loaded(qwen3_folder)
    before = weights(core)
    with pytest.raises(BadRequest, match=reason):
        core.weights.load_adapter(
            "a", save_adapter(tmp_path, random_pairs({**ATTENTION, **modules}, 1)), "1", flush=True
        )
    assert (core.weight_version, core.weights.stale) == ("default", None)
    assert_same(weights(core), before)


def test_bucketed_adapter_is_merged_with_the_last_bucket(qwen3_folder: Path) -> None:
    core, base = loaded(qwen3_folder), folder_weights(qwen3_folder)
    tensors = random_pairs(ATTENTION, 1)
    names = sorted(tensors)

    def bucket(number: int, part: list[str], **change: Any) -> AnnouncedBucket:
        shapes = [tuple(tensors[name].shape) for name in part]
        facts = {"adapter": FACTS, "shapes": shapes} | change
        return AnnouncedBucket("g", part, [torch.float32] * len(part), number=number, count=3, **facts)

    def arrive(one: AnnouncedBucket) -> None:
        core.weights.expect_from_group(one, "1")
        core.weights.update_from_group(one, {name: tensors[name] for name in one.names}, "1", flush=True)

    arrive(bucket(1, names[:3]))
    arrive(bucket(2, names[3:6]))
    assert core.weight_version == "default"
    assert_same(weights(core), base)
    core.resume()
    assert core.weights.stale is None  # a sender that dies now has changed nothing
    with pytest.raises(Conflict, match="bucket 2 of 3 arrived instead of bucket 3"):
        arrive(bucket(2, names[6:]))
    with pytest.raises(BadRequest, match=r"but this model needs \(\d+, \d+\)"):
        arrive(bucket(3, names[6:], adapter=AdapterConfig(2, 1.0)))
    arrive(bucket(3, names[6:]))
    assert core.weight_version == "1"
    assert_same(weights(core), expected(base, tensors, torch.float32))


def test_lora_routes_load_and_unload_an_adapter(engine: EngineProcess, qwen3_folder: Path, tmp_path: Path) -> None:
    asked = {"input_ids": [5, 9, 3], "sampling_params": {"max_new_tokens": 4, "temperature": 0}, "return_logprob": True}
    plain = engine.generate(**asked)["meta_info"]["output_token_logprobs"]
    folder = save_adapter(tmp_path, random_pairs(ATTENTION, 1))
    status, answer = engine.post(
        "/load_lora_adapter", {"lora_name": "policy", "lora_path": folder, "pinned": False, "weight_version": "7"}
    )
    assert (status, answer["success"], answer["loaded_adapters"]) == (200, True, {"policy": folder})
    assert answer["weight_version"] == "7"
    assert engine.get("/server_info")[1]["lora_adapter"] == "policy"
    with_adapter = engine.generate(**asked)["meta_info"]
    assert with_adapter["weight_version"] == "7"
    assert with_adapter["output_token_logprobs"] != plain
    assert engine.post("/unload_lora_adapter", {"lora_name": "other"})[0] == 400
    status, answer = engine.post("/unload_lora_adapter", {"lora_name": "policy", "weight_version": "default"})
    assert (status, answer["loaded_adapters"]) == (200, {})
    again = engine.generate(**asked)["meta_info"]["output_token_logprobs"]
    assert [token_id for _, token_id, _ in again] == [token_id for _, token_id, _ in plain]
    # the restored weights lie elsewhere in memory, and products round by alignment
    assert [log_prob for log_prob, _, _ in again] == pytest.approx([log_prob for log_prob, _, _ in plain], abs=1e-5)


def test_rejects_an_adapter_while_weights_are_released(engine: EngineProcess, tmp_path: Path) -> None:
    body = {"lora_name": "policy", "lora_path": save_adapter(tmp_path, random_pairs(ATTENTION, 1))}
    engine.post("/release_memory_occupation", {})
    try:
        status, answer = engine.post("/load_lora_adapter", body)
        assert (status, "weights are released" in answer["error"]["message"]) == (400, True)
    finally:
        engine.post("/resume_memory_occupation", {})
    assert engine.post("/load_lora_adapter", body)[0] == 200
    assert engine.post("/unload_lora_adapter", {"lora_name": "policy"})[0] == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_path": "x"}, "lora_name"),
        ({"lora_name": "a"}, "lora_path"),
        ({"lora_name": "a", "lora_path": ["x"]}, "lora_path"),
        ({"lora_name": "a", "lora_path": "/nowhere"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "\0"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "a" * 5000}, "lora_path"),
        ({"lora_name": "a", "lora_path": "/tmp"}, "lora_path"),
    ],
)
def test_rejects_an_invalid_adapter_naming_the_parameter(
    engine: EngineProcess, body: dict[str, Any], param: str
) -> None:
    status, answer = engine.post("/load_lora_adapter", body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert engine.get("/health_generate")[0] == 200


@pytest.mark.parametrize(
    "adapter", [[], "x", {"r": 4}, {"r": True, "lora_alpha": 1}, {"r": 4, "lora_alpha": 1, "base_dtype": "int8"}]
)
def test_rejects_invalid_facts_of_a_broadcast_adapter(engine: EngineProcess, adapter: Any) -> None:
    body = {"names": [], "dtypes": [], "shapes": [], "group_name": "g", "adapter": adapter}
    status, answer = engine.post("/update_weights_from_distributed", body)
    assert (status, answer["error"]["param"]) == (400, "adapter")
