"""Models on the meta device and sources of their weights: full and partial reads match what transformers loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from slime.cli import main
from slime.errors import UserError
from slime.models.families.tp_sharding import Region, whole_region
from slime.models.loading import load_causal_lm
from slime.models.meta_model import MetaModel, load_meta_model
from slime.models.safetensors_io import StoredTensor
from slime.models.tensor_sources import Source, read_whole
from tests.tiny_models import make_model_folder

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES: dict[str, dict[str, object]] = {
    "qwen3": {"tie_word_embeddings": True},
    "qwen2": {},
    "llama": {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 8},
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window": 8},
    "phi3": {},
    "olmo2": {},
    "glm4": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "qwen3_moe": {"num_experts": 4, **EXPERTS},
    "qwen2_moe": {"num_experts": 4, **EXPERTS, "shared_expert_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {"n_routed_experts": 4, **EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "deepseek_v3": {
        **{"n_routed_experts": 4, **EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16},
    },
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in folders:
            place = tmp_path_factory.mktemp("models") / family
            folders[family] = make_model_folder(place, family, **FAMILIES[family])
        return folders[family]

    return folder


def load_outline(folder: Path, dtype: torch.dtype = torch.float32, **how: bool) -> MetaModel:
    return load_meta_model(folder, dtype=dtype, attn_implementation="eager", **how)


def load_with_transformers(folder: Path, dtype: torch.dtype = torch.float32, **how: bool) -> PreTrainedModel:
    return load_causal_lm(folder, dtype=dtype, device="cpu", attn_implementation="eager", **how)


def regions(shape: tuple[int, ...]) -> Iterator[Region]:
    """Yields the whole region, slices of the first dimension (one is empty), and a part of all dimensions."""
    everything = whole_region(shape)
    yield everything
    if shape:
        ends = [0, shape[0] // 3, shape[0] - shape[0] // 3, shape[0], shape[0]]
        for begin, end in pairwise(ends):
            yield (slice(begin, end), *everything[1:])
        yield tuple(slice(size // 3, max(size - 1, size // 3)) for size in shape)


def assert_reads(source: Source, expected: Tensor) -> None:
    assert (source.shape, source.dtype) == (tuple(expected.shape), expected.dtype)
    for region in regions(source.shape):
        part = source.read(region)
        assert part.dtype == expected.dtype
        assert torch.equal(part, expected[region])


def assert_same(found: MetaModel, expected: PreTrainedModel) -> None:
    """Compares all visible state of two models. The parameters of `found` are on the meta device."""
    model = found.model
    parameters = dict(expected.named_parameters())
    empty = dict(model.named_parameters())
    assert list(empty) == list(found.sources) == list(parameters)
    for name, parameter in parameters.items():
        assert (empty[name].device.type, type(empty[name])) == ("meta", torch.nn.Parameter)
        assert (empty[name].shape, empty[name].dtype) == (parameter.shape, parameter.dtype)
        assert empty[name].requires_grad == parameter.requires_grad
        assert_reads(found.sources[name], parameter.detach())
    buffers = dict(model.named_buffers())
    assert list(buffers) == [name for name, _ in expected.named_buffers()]
    for name, buffer in expected.named_buffers():
        assert (buffers[name].device, buffers[name].dtype) == (buffer.device, buffer.dtype)
        assert torch.equal(buffers[name], buffer)
    assert model.state_dict().keys() == expected.state_dict().keys()
    assert model.config.to_dict() == expected.config.to_dict()
    assert model.config.name_or_path == expected.config.name_or_path
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()
    assert [module.training for module in model.modules()] == [module.training for module in expected.modules()]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_region_of_every_weight_matches_transformers(family: str, made: Callable[[str], Path]) -> None:
    folder = made(family)
    random_state = torch.get_rng_state()
    for dtype in (torch.float32, torch.bfloat16):
        found = load_outline(folder, dtype)
        assert torch.equal(torch.get_rng_state(), random_state)
        assert_same(found, load_with_transformers(folder, dtype))


def test_partial_read_reads_only_its_bytes(made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads one row of a matrix, and one expert of a fused tensor."""
    read: list[int] = []
    real = StoredTensor._bytes
    monkeypatch.setattr(
        StoredTensor, "_bytes", lambda self, begin, count: read.append(count) or real(self, begin, count)
    )
    sources = load_outline(made("qwen3_moe")).sources
    assert read == []
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.experts.gate_up_proj"):
        source = sources[name]
        part = source.read((slice(1, 2), *whole_region(source.shape)[1:]))
        assert sum(read) == part.nbytes == read_whole(source).nbytes // source.shape[0]
        read.clear()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_fp8_weights_with_partial_blocks_match_transformers(family: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 160, "intermediate_size": 300}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 80} if family == "qwen3_moe" else {}
    plain = make_model_folder(tmp_path / "plain", family, **sizes, **experts)
    assert main(["convert", str(plain), str(tmp_path / "fp8"), "--dtype", "fp8"]) == 0
    for dtype in (torch.float32, torch.bfloat16):
        assert_same(load_outline(tmp_path / "fp8", dtype), load_with_transformers(tmp_path / "fp8", dtype))
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    name = next(name for name in stored if name.endswith("_scale_inv"))
    stored[name] = stored[name][:1, :1].contiguous()
    save_file(stored, tmp_path / "fp8" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"{name.removesuffix('_scale_inv')} in .* without a scale for each block"):
        load_outline(tmp_path / "fp8")


def test_mxfp4_experts_are_loaded_by_transformers(made: Callable[[str], Path], tmp_path: Path) -> None:
    """Experts in MXFP4, which transformers dequantizes itself."""
    folder = Path(shutil.copytree(made("gpt_oss"), tmp_path / "model"))
    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inner, outer = stored.pop(name).shape
        stored[f"{name}_blocks"] = torch.randint(0, 256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
        stored[f"{name}_scales"] = torch.randint(120, 126, (experts, outer, inner // 32), dtype=torch.uint8)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(config))
    assert_same(load_outline(folder), load_with_transformers(folder))


@pytest.mark.parametrize("same", [True, False])
def test_tied_weights_stored_twice_are_shared_only_if_equal(same: bool, tmp_path: Path) -> None:
    """Both tensors must be read to compare them."""
    folder = make_model_folder(tmp_path / "model", "qwen3", tie_word_embeddings=True)
    stored = load_file(folder / "model.safetensors")
    embedding = stored["model.embed_tokens.weight"]
    stored["lm_head.weight"] = embedding.clone()
    stored["lm_head.weight"][-1, -1] += 0 if same else 1
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    found = load_outline(folder)
    assert_same(found, load_with_transformers(folder))
    assert (found.model.lm_head.weight is found.model.model.embed_tokens.weight) == same


def test_reads_the_same_weight_files_as_transformers(made: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made("qwen3"), tmp_path / "model"))
    expected = load_with_transformers(folder)
    names = sorted(stored := load_file(folder / "model.safetensors"))
    wrong = {name: tensor + 1 for name, tensor in stored.items()}
    save_file(wrong, folder / "consolidated.safetensors", metadata={"format": "pt"})
    assert_same(load_outline(folder), expected)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"there is no model.safetensors and no model.safetensors.index.json"):
        load_outline(folder)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: stored[name] for name in members}, folder / file, metadata={"format": "pt"})
    index = {"weight_map": {name: file for file, members in shards.items() for name in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same(load_outline(folder), expected)
    (folder / "b.safetensors").unlink()
    with pytest.raises(UserError, match=r"cannot be loaded: b.safetensors is not there"):
        load_outline(folder)


def test_rejects_truncated_and_missing_weight_files(made: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made("qwen3"), tmp_path / "model"))
    found = load_outline(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(UserError, match=r"model.safetensors ends before \S+ does: copy or download it again"):
        [read_whole(source) for source in found.sources.values()]
    with pytest.raises(UserError, match=r"model.safetensors cannot be loaded: it ends before \S+ does"):
        load_outline(folder)
    file.unlink()
    with pytest.raises(UserError, match=r"model.safetensors cannot be read: No such file"):
        [read_whole(source) for source in found.sources.values()]


def test_value_head_is_initialized_with_zeros(made: Callable[[str], Path]) -> None:
    for family in ("qwen3", "qwen2"):  # with a tied and with a separate output layer
        found, body = load_outline(made(family)), load_with_transformers(made(family))
        found.put_value_head()
        assert found.model.lm_head.weight.shape == (1, 64)
        assert list(found.sources) == [name for name, _ in found.model.named_parameters()]
        assert_reads(found.sources["lm_head.weight"], torch.zeros(1, 64))
        assert_reads(found.sources["model.embed_tokens.weight"], body.get_input_embeddings().weight.detach())


OWN_CODE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_outline"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("kept", torch.zeros(3))
        self.register_buffer("made", torch.arange(4.0), persistent=False)

    def _init_weights(self, module):
        super()._init_weights(module)
        if module is self:
            self.made.copy_(torch.arange(4.0))
"""


def test_folder_with_custom_code_needs_trust_remote_code(made: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made("llama"), tmp_path / "model"))
    (folder / "own.py").write_text(OWN_CODE)
    config = json.loads((folder / "config.json").read_text()) | {
        "model_type": "own_outline",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_file(folder / "model.safetensors")
    save_file(stored | {"kept": torch.tensor([1.0, 2.0, 3.0])}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="pass --trust-remote-code"):
        load_outline(folder)
    found = load_outline(folder, trust_remote_code=True)
    assert type(found.model).__name__ == "OwnForCausalLM"
    assert (found.model.kept.tolist(), found.model.made.tolist()) == ([1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0])
    assert_same(found, load_with_transformers(folder, trust_remote_code=True))
