"""Folders of known families: every tensor is used, ignored with a reason, or the folder is rejected."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from slime.config.model_folder import LLAMA_LIKE, check_model_folder
from slime.errors import UserError
from slime.models.dequantized import plain_sources
from slime.models.families.model_folder import open_family_folder
from slime.models.loading import load_causal_lm
from slime.models.meta_model import load_meta_model
from slime.models.tensor_sources import read_whole
from tests.family_models import BASE, FAMILY_MODELS, make_family_folder
from tests.tiny_models import VOCAB, make_tokenizer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family_folder(tmp_path_factory.mktemp("qwen2"), "qwen2")


def copy_with_tensors(made: Path, folder: Path, **tensors: Tensor | None) -> Path:
    """Copies the folder with some tensors added, or removed if None."""
    weights = load_file(made / "model.safetensors") | tensors
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, folder / "model.safetensors")
    (folder / "config.json").write_text((made / "config.json").read_text())
    return folder


def test_folder_opens_with_sources_for_its_parameters(made: Path) -> None:
    folder = open_family_folder(made, vocab_divisor=1)
    assert folder.family.name == "Qwen2.5"
    assert folder.unused_tensors() == {}
    entry = folder.entries["embedding.word_embeddings.weight"]
    shard = folder.shard(entry, 1, 2)
    assert shard.shape == (125, 64)
    (share,) = shard.shares
    assert torch.equal(
        folder.sources[entry.hf[0]].read(share.region),
        load_file(made / "model.safetensors")["model.embed_tokens.weight"][125:],
    )


def test_extra_tensors_are_ignored_with_a_reason(made: Path, tmp_path: Path) -> None:
    head = load_file(made / "model.safetensors")["model.embed_tokens.weight"].clone()
    extra = {"lm_head.weight": head, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    reasons = open_family_folder(copy_with_tensors(made, tmp_path, **extra)).unused_tensors()
    assert reasons.keys() == extra.keys()
    assert "tie_word_embeddings" in reasons["lm_head.weight"]


def test_unused_prediction_layers_are_reported_with_the_reason(tmp_path: Path) -> None:
    made = make_family_folder(tmp_path, "glm4_moe", num_nextn_predict_layers=1)
    weights = load_file(made / "model.safetensors")
    last = {name.replace(".3.", ".4.", 1): tensor.clone() for name, tensor in weights.items() if "layers.3." in name}
    save_file(weights | last, made / "model.safetensors", metadata={"format": "pt"})
    (sentence,) = open_family_folder(made).unused_tensor_notes()
    assert sentence.startswith(f"{len(last)} tensors of {made} (such as model.layers.4.")
    assert sentence.endswith("it predicts a token beyond the next, which training does not use")


def test_separate_output_layer_overrides_tie_word_embeddings(made: Path, tmp_path: Path) -> None:
    assert open_family_folder(made).entries["output_layer.weight"].is_copy
    head = load_file(made / "model.safetensors")["model.embed_tokens.weight"] + 1
    folder = open_family_folder(copy_with_tensors(made, tmp_path, **{"lm_head.weight": head}))
    assert folder.unused_tensors() == {}
    assert folder.entries["output_layer.weight"].hf == ("lm_head.weight",)
    assert not folder.entries["output_layer.weight"].is_copy
    assert folder.fields["share_embeddings_and_output_weights"] is False


def test_rejects_an_unknown_tensor(made: Path, tmp_path: Path) -> None:
    folder = copy_with_tensors(made, tmp_path, **{"model.layers.0.mlp.extra.weight": torch.zeros(2)})
    with pytest.raises(UserError, match=r"mlp\.extra\.weight in .* would be lost"):
        open_family_folder(folder)


def test_rejects_a_folder_with_missing_weights(made: Path, tmp_path: Path) -> None:
    folder = copy_with_tensors(
        made, tmp_path, **{"model.norm.weight": None, "model.layers.3.mlp.down_proj.weight": None}
    )
    with pytest.raises(UserError, match=r"lack model\.norm\.weight and 1 more"):
        open_family_folder(folder)


@pytest.mark.parametrize(
    ("case", "changes", "tensor", "found", "wanted"),
    [
        ("qwen3", {"intermediate_size": 128}, "layers.0.mlp.down_proj.weight", (64, 96), (64, 128)),
        ("qwen3", {"num_attention_heads": 4}, "layers.0.self_attn.o_proj.weight", (64, 128), (64, 64)),
        ("qwen3", {"head_dim": 8}, "layers.0.self_attn.k_norm.weight", (16,), (8,)),
        ("qwen3_moe", {"moe_intermediate_size": 48}, "layers.0.mlp.experts.down_proj", (4, 64, 32), (4, 64, 48)),
    ],
)
def test_rejects_weights_whose_shapes_contradict_the_config(
    tmp_path: Path, case: str, changes: dict[str, int], tensor: str, found: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    make_family_folder(tmp_path, case)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    sentence = (
        f"model.{tensor} in {tmp_path} has shape {found}, but its config.json asks for {wanted}: correct it, or take "
        "config and weights of the same model"
    )
    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    for load in (partial(load_causal_lm, device="cpu"), load_meta_model):
        with pytest.raises(UserError) as caught:
            load(tmp_path, **how)
        assert str(caught.value) == sentence


@pytest.mark.parametrize("head_dim", [None, 24])
@pytest.mark.parametrize("model_type", LLAMA_LIKE)
def test_shape_check_accepts_matching_and_rejects_other_configs(
    tmp_path: Path, model_type: str, head_dim: int | None
) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip("its code has another name")
    sizes = {name: BASE[name] for name in BASE.keys() - {"head_dim", "num_hidden_layers"}} | {"num_hidden_layers": 1}
    experts = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4}
    config = CONFIG_MAPPING[model_type](**sizes, **experts, **({} if head_dim is None else {"head_dim": head_dim}))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    written = {**sizes, "model_type": model_type, **({} if head_dim is None else {"head_dim": head_dim})}
    (tmp_path / "config.json").write_text(json.dumps(written))
    check_model_folder(str(tmp_path), "--hf-checkpoint")
    (tmp_path / "config.json").write_text(json.dumps({**written, "num_key_value_heads": 2, "head_dim": 24}))
    with pytest.raises(UserError, match=r"layers\.0\.self_attn\.[kq]_proj\.weight in .* has shape"):
        check_model_folder(str(tmp_path), "--hf-checkpoint")


def test_multimodal_folder_opens_with_its_text_model(tmp_path: Path) -> None:
    made = make_family_folder(tmp_path / "text", "qwen3_5")
    weights = load_file(made / "model.safetensors")
    moved = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in weights.items()}
    seen = {"model.visual.patch_embed.weight": torch.zeros(2)}
    save_file(moved | seen, tmp_path / "model.safetensors")
    config = json.loads((made / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": config}))
    folder = open_family_folder(tmp_path)
    assert folder.family.name == "Qwen3.5 / 3.6"
    assert list(folder.unused_tensors()) == ["model.visual.patch_embed.weight"]
    assert folder.entries["decoder.final_layernorm.weight"].hf == ("model.language_model.norm.weight",)


@pytest.mark.parametrize("case", ["kimi_k2", "mimo"])
def test_renamed_model_types_load_like_their_base_family(tmp_path: Path, case: str) -> None:
    folder = make_family_folder(tmp_path, case, vocab_size=VOCAB)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == case
    remote = {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}, "architectures": ["Own"]}
    (folder / "config.json").write_text(json.dumps(config | remote))
    make_tokenizer().save_pretrained(folder)
    (folder / "plain").mkdir()
    save_file(load_file(folder / "model.safetensors"), folder / "plain" / "model.safetensors", {"format": "pt"})
    (folder / "plain" / "config.json").write_text(json.dumps({**config, "model_type": FAMILY_MODELS[case][0]}))
    how = {"dtype": torch.float32, "device": "cpu", "attn_implementation": "eager"}
    own, plain = (load_causal_lm(path, **how) for path in (folder, folder / "plain"))
    ids = torch.arange(9)[None]
    assert torch.equal(own(ids).logits, plain(ids).logits)
    outline = load_meta_model(folder, dtype=torch.float32, attn_implementation="eager")
    for name, parameter in plain.named_parameters():
        assert torch.equal(read_whole(outline.sources[name]), parameter), name
    assert AutoTokenizer.from_pretrained(folder).encode("12")


def test_mxfp4_experts_match_transformers(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 6, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 140, (3, 6, 2), dtype=torch.uint8, generator=generator)
    name = "model.layers.0.mlp.experts.down_proj"
    save_file({f"{name}_blocks": blocks, f"{name}_scales": scales}, tmp_path / "model.safetensors")
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = plain_sources(tmp_path)[name]
    whole = convert_moe_packed_tensors(blocks, scales)
    assert source.shape == whole.shape == (3, 64, 6)
    assert torch.equal(read_whole(source), whole)
    region = (slice(1, 3), slice(20, 41), slice(2, 5))
    assert torch.equal(source.read(region), whole[region])


def test_rejects_an_unsupported_quantization(made: Path, tmp_path: Path) -> None:
    folder = copy_with_tensors(made, tmp_path)
    config = json.loads((made / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(UserError, match=r"quantised \(awq\)"):
        open_family_folder(folder)
