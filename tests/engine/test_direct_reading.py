"""Models for the fused kernels, read without transformers, equal the models that transformers loads."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from slime.engine.embedded import loader
from slime.engine.embedded.errors import BadRequest
from slime.engine.embedded.fused.supported_models import block_of
from slime.engine.embedded.loader import LoadedModel, NamedWeights, PlainFolder, through_transformers
from slime.engine.embedded.memory import EngineMemory
from slime.engine.embedded.model.self_test import NumericsMismatch, PlainForward
from slime.engine.embedded.options import parse_options
from slime.engine.embedded.tokenizer import plain_tokenizer
from slime.engine.embedded.weights import folder as reading
from slime.engine.embedded.weights import loading
from slime.engine.embedded.weights.lora import MergedAdapter
from slime.engine.embedded.weights.parameter_views import FolderViews
from tests.engine.test_experts import FAMILIES
from tests.tiny_models import make_model_folder, make_tokenizer


class HostRegion:
    """Host memory in place of a GPU region."""

    range = SimpleNamespace(prepare=lambda size: None)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)


def host_memory() -> EngineMemory:
    memory = object.__new__(EngineMemory)
    memory._weights = HostRegion()  # type: ignore[assignment]
    return memory


def read(folder: Path, dtype: torch.dtype = torch.float32) -> LoadedModel | None:
    found = PlainFolder.at(str(folder), trust_remote_code=False)
    return None if found is None else found.read(dtype, host_memory())


def load_with_transformers(folder: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    options = parse_options(["--model-path", str(folder)])
    return through_transformers(options, "cpu", dtype, None, fused_kernels=False)


def test_server_and_fused_model_load_without_transformers(qwen3_folder: Path, tmp_path: Path) -> None:
    program = f"""
import sys, types, torch
import slime.engine.embedded.__main__
from slime.engine.embedded.loader import PlainFolder
from slime.engine.embedded.memory import EngineMemory
from slime.engine.embedded.tokenizer import plain_tokenizer
memory = object.__new__(EngineMemory)
memory._weights = types.SimpleNamespace(range=types.SimpleNamespace(prepare=lambda size: None), empty=lambda shape,
    dtype: torch.empty(shape, dtype=dtype))
model = PlainFolder.at({str(qwen3_folder)!r}, trust_remote_code=False).read(torch.float32, memory)
runner = model.runner(__import__("numpy").zeros((3, 16), "int32"))
runner.allocate_kv(8)
torch.save(model.logits(torch.tensor([[5, 6, 7]])), {str(tmp_path / "logits")!r})
print(plain_tokenizer({str(qwen3_folder)!r}).encode("what is 12+34?"))
sys.exit("transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [284, 264, 286, 13, 267, 33]
    model = AutoModelForCausalLM.from_pretrained(qwen3_folder, dtype=torch.float32)
    expected = model(torch.tensor([[5, 6, 7]])).logits
    torch.testing.assert_close(torch.load(tmp_path / "logits"), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_directly_read_weights_match_transformers(
    tmp_path: Path, dtype: torch.dtype, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model_folder(tmp_path / "model", tie_word_embeddings=tied)
    whole = load_file(folder / "model.safetensors")
    names = sorted(whole)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: whole[name] for name in part}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr(reading, "_PIECE", 1000)
    loaded, expected = read(folder, dtype), load_with_transformers(folder, dtype)
    assert loaded is not None
    own, theirs = loaded.weights.state_dict(), expected.weights.state_dict()
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[name], theirs[name]) for name in theirs)
    assert (own["lm_head.weight"].data_ptr() == own["model.embed_tokens.weight"].data_ptr()) is tied
    assert loaded.views.missing(set(own)) == expected.views.missing(set(own)) == []
    assert loaded.views.missing({"lm_head.weight"}) == expected.views.missing({"lm_head.weight"})


@pytest.mark.parametrize(
    ("model_type", "config", "generation"),
    [("qwen3", {}, {"eos_token_id": [7, 9]}), ("llama", {}, None), ("qwen2", {"eos_token_id": [3, 4]}, None)],
)
def test_eos_ids_match_transformers(
    tmp_path: Path, model_type: str, config: dict[str, Any], generation: dict[str, Any] | None
) -> None:
    folder = make_model_folder(tmp_path / "model", model_type)
    file = folder / "config.json"
    facts = json.loads(file.read_text())
    facts.pop("eos_token_id", None)
    file.write_text(json.dumps({**facts, **config}))
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    loaded = read(folder)
    assert loaded is not None
    assert loaded.eos_ids == load_with_transformers(folder).eos_ids != frozenset()


def change_config(folder: Path, **own: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **own}))


@pytest.mark.parametrize("oddity", ["lacks a tensor", "other shape", "integers", "quantised", "other family", "cut"])
def test_unusual_folders_are_left_to_transformers(tmp_path: Path, oddity: str) -> None:
    folder = make_model_folder(tmp_path / "model", "gemma2" if oddity == "other family" else "qwen3")
    file = folder / "model.safetensors"
    weights = load_file(file)
    if oddity == "lacks a tensor":
        del weights["model.norm.weight"]
    elif oddity == "other shape":
        weights["model.norm.weight"] = torch.ones(3)
    elif oddity == "integers":
        weights["model.norm.weight"] = weights["model.norm.weight"].int()
    elif oddity == "quantised":
        change_config(folder, quantization_config={"quant_method": "fp8"})
    save_file(weights, file)
    if oddity == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    assert read(folder) is None


def test_updates_reach_directly_read_weights(qwen3_folder: Path, tmp_path: Path) -> None:
    loaded = read(qwen3_folder)
    assert loaded is not None
    place = loaded.weights.state_dict()["model.norm.weight"]
    save_file({"model.norm.weight": torch.full_like(place, 3.0)}, tmp_path / "new.safetensors")
    loading.load_from_files(loaded.views, [str(tmp_path / "new.safetensors")], config_folder=str(qwen3_folder))
    assert bool((place == 3.0).all())
    with pytest.raises(BadRequest, match="does not have"):
        loading.load_tensors(loaded.views, {"model.nothing": place}, "a test")
    assert loaded.views.readable().keys() == loaded.weights.state_dict().keys()


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
def test_unloading_an_adapter_restores_the_folder_weights(tmp_path: Path, model_type: str) -> None:
    own = FAMILIES["qwen3_moe"][0] if model_type == "qwen3_moe" else {}
    folder = make_model_folder(tmp_path / "model", model_type, **own)
    loaded = read(folder)
    assert loaded is not None
    before = {name: tensor.clone() for name, tensor in loaded.weights.state_dict().items()}
    adapter = MergedAdapter(loaded.views, str(folder), trust_remote_code=False)
    for tensor in loaded.weights.state_dict().values():
        tensor.zero_()
    adapter.mark_overwritten()
    adapter.unload()
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.weights.state_dict().items())


def test_tied_weights_stay_tied_after_conversion() -> None:
    tensor = torch.ones(2, 2)
    weights = NamedWeights({"a.b.weight": tensor, "c.weight": tensor})
    weights.to(torch.float64)
    state = weights.state_dict()
    assert state["a.b.weight"].data_ptr() == state["c.weight"].data_ptr()
    assert FolderViews(weights, read_directly=True).missing({"c.weight"}) == []


QWEN_SPLITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def qwen_folder(path: Path) -> Path:
    """Save a tokenizer in the format of Qwen's folders."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(path)
    facts = json.loads((path / "tokenizer.json").read_text())
    facts["normalizer"] = {"type": "NFC"}
    split = {"type": "Split", "pattern": {"Regex": QWEN_SPLITS}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    facts["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    (path / "tokenizer.json").write_text(json.dumps(facts))
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tokenizer_class": "Qwen2Tokenizer"}))
    return path


@pytest.mark.parametrize("kind", ["tiny", "quickstart", "qwen"])
def test_plain_tokenizer_matches_transformers(tmp_path: Path, kind: str) -> None:
    if kind == "tiny":
        make_tokenizer().save_pretrained(tmp_path)
    folder = Path("slime/quickstart/tokenizer") if kind == "quickstart" else tmp_path
    if kind == "qwen":
        qwen_folder(tmp_path)
    plain, theirs = plain_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert plain is not None
    assert plain.agrees_with(theirs)
    assert plain.get_vocab() == theirs.get_vocab()
    texts = ["what is 12+34?", "", "a<|im_end|>b  c\u0301", "\n\n x"]
    for text in texts:
        for special in (True, False):
            assert plain.encode(text, add_special_tokens=special) == theirs.encode(text, add_special_tokens=special)
    lists = [[*range(3 * at, 3 * at + 9)] for at in range(30)]
    for skip in (True, False):
        assert plain.batch_decode(lists, skip_special_tokens=skip) == theirs.batch_decode(
            lists, skip_special_tokens=skip
        )


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "LlamaTokenizerFast"},
        {"tokenizer_class": "Qwen2Tokenizer"},
        {"add_bos_token": True},
        {"bos_token": "<new>"},
        {"add_prefix_space": True},
        {"extra_special_tokens": ["the"]},
        {"added_tokens_decoder": {"7": {"content": "<tool>", "special": False}}},
    ],
)
def test_unusual_tokenizers_are_left_to_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    tokenizer: PreTrainedTokenizerFast = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    assert plain_tokenizer(tmp_path) is None


def test_falls_back_to_transformers_if_fused_kernels_are_wrong(
    qwen3_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    compare = PlainForward.compare

    def load(*how: Any, fused_kernels: bool) -> LoadedModel:
        asked.append(fused_kernels)
        model = through_transformers(*how, fused_kernels=False)
        return replace(model, block=block_of(model.facts)) if fused_kernels else model

    def wrong_at_first(self: PlainForward, *engine: Any) -> None:
        if asked == [True]:
            raise NumericsMismatch("a test")
        compare(self, *engine)

    monkeypatch.setattr(loader, "through_transformers", load)
    monkeypatch.setattr(PlainForward, "compare", wrong_at_first)
    engine = loader.LoadedEngine(parse_options(["--model-path", str(qwen3_folder)]), "cpu")
    assert asked == [True, False]
    assert engine.model.block is None
    assert engine.runner.model is engine.model.weights
