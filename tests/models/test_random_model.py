"""Model folders with random weights: loadable, reproducible by seed, and rejected for invalid fields."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from slime import cli
from slime.errors import UserError
from slime.models.catalog import published_model
from slime.models.loading import load_causal_lm
from slime.models.random_model import write_random_model
from slime.models.safetensors_io import open_weights

SMALL = ("num_hidden_layers=2", "hidden_size=64", "num_attention_heads=4", "num_key_value_heads=2", "vocab_size=300")
SHAPES = {
    "qwen3-0.6B": (*SMALL, "intermediate_size=96", "head_dim=16"),
    "glm4-9B": (*SMALL, "intermediate_size=96"),
    "qwen3-30B-A3B": (*SMALL, "head_dim=16", "num_experts=4", "num_experts_per_tok=2", "moe_intermediate_size=32"),
    "deepseek-v3": (
        *(*SMALL[:3], "num_key_value_heads=4", "vocab_size=300", "intermediate_size=96", "first_k_dense_replace=1"),
        *("n_routed_experts=8", "n_group=2", "topk_group=1", "num_experts_per_tok=2", "moe_intermediate_size=32"),
        *("q_lora_rank=24", "kv_lora_rank=16", "qk_nope_head_dim=16", "qk_rope_head_dim=8", "v_head_dim=16"),
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_random_model_loads_and_tokenizes_text(name: str, tmp_path: Path) -> None:
    words = [word for field in SHAPES[name] for word in ("--set", field)]
    folder = tmp_path / "model"
    assert cli.main(["models", name, "--random-weights", str(folder), "--dtype", "float32", *words]) == 0
    model = load_causal_lm(folder, dtype=torch.float32, attn_implementation="sdpa", device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "naïve 7"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nnaïve 7<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert ids.shape[1] == 3 + len("user\nnaïve 7\nassistant\n".encode())
    assert tokenizer.decode(ids[0]) == text
    with torch.no_grad():
        logits = model(ids).logits
    assert logits.shape == (1, ids.shape[1], 300)
    assert 0 < logits.std() < 1
    config = json.loads((folder / "config.json").read_text())
    assert (config["eos_token_id"], config["dtype"], config["num_hidden_layers"]) == (2, "float32", 2)
    norms = {read for read in open_weights(folder).names if read.endswith("norm.weight")}
    assert norms
    assert all(bool((open_weights(folder)[norm] == 1).all()) for norm in norms)


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    config = published_model("qwen3-0.6B").with_fields(SHAPES["qwen3-0.6B"]).config
    one, same, other = (write_random_model(config, tmp_path / str(i), seed=seed) for i, seed in enumerate((1, 1, 2)))
    name = "model.layers.0.mlp.up_proj.weight"
    weights = [open_weights(folder)[name] for folder in (one, same, other)]
    assert weights[0].dtype == torch.bfloat16
    assert weights[0].float().std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_foreign_files_are_not_overwritten(tmp_path: Path) -> None:
    config = published_model("qwen3-0.6B").with_fields(SHAPES["qwen3-0.6B"]).config
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"has notes.txt, which no run saved there"):
        write_random_model(config, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--set", "num_layers=2"], "has no num_layers; did you mean num_hidden_layers?"),
        (["--set", "two"], "--set two is not of the form FIELD=VALUE, such as num_hidden_layers=4"),
        (["--set", "vocab_size=200"], "vocab_size 200 is too small: the tokenizer of a random model has 259 tokens"),
        (["--set", "hidden_size=many"], "config.json is not a valid qwen3 config"),
    ],
)
def test_rejects_invalid_fields_and_creates_no_folder(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["models", "qwen3-0.6B", "--random-weights", str(tmp_path / "model"), *words]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
