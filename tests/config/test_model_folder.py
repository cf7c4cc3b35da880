"""Start-up checks of folders that weights are read from."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config, resolve
from slime.config.model_folder import INDEX, conversion
from slime.errors import UserError
from tests.model_files import add_weights, write_safetensors


def rejection(valid: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(UserError) as caught:
        resolve(Config(**{**valid, **changes}))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def truncate_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def make_shards(folder: Path) -> None:
    """Replace the weights with two files and their index."""
    (folder / "model.safetensors").unlink()
    names = {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}
    for name, file in names.items():
        write_safetensors(folder / file, (name,))
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))


def remove_shard(folder: Path) -> None:
    make_shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def replace_shard(folder: Path) -> None:
    make_shards(folder)
    write_safetensors(folder / "model-00002-of-00002.safetensors", ("c.weight",))


def remove_index(folder: Path) -> None:
    make_shards(folder)
    (folder / INDEX).unlink()


def break_index(folder: Path) -> None:
    make_shards(folder)
    (folder / INDEX).write_text("[]")


def replace_weights(name: str, content: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(content)

    return write


def adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}')
    (folder / "config.json").unlink()


def gguf(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "q4.gguf").write_bytes(b"GGUF")


def megatron_names(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "latest_checkpointed_iteration.txt").write_text("1")


AGAIN = "download the folder again"


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (
            truncate_weights,
            rf"--hf-checkpoint: DIR/model.safetensors has \d+ of the \d+ bytes that its header names: {AGAIN}",
        ),
        (
            remove_shard,
            f"--hf-checkpoint: DIR lacks 1 of 2 weight files, model-00002-of-00002.safetensors first: {AGAIN}",
        ),
        (
            replace_shard,
            f"--hf-checkpoint: DIR/model-00002-of-00002.safetensors lacks b.weight, which {INDEX} lists in it: {AGAIN}",
        ),
        (
            remove_index,
            "--hf-checkpoint DIR has model-00001-of-00002.safetensors, model-00002-of-00002.safetensors, but no "
            f"{INDEX} that lists their tensors: {AGAIN}",
        ),
        (break_index, rf"--hf-checkpoint: DIR/{INDEX} is not an index of weights \(TypeError\): {AGAIN}"),
        (
            lambda folder: (folder / "model.safetensors").unlink(),
            f"--hf-checkpoint DIR has no weights: there is no model.safetensors, {AGAIN}",
        ),
        (
            replace_weights("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"),
            "--hf-checkpoint: DIR/model.safetensors is only a Git LFS pointer: run git lfs pull in that folder",
        ),
        (
            replace_weights("model.safetensors", struct.pack("<Q", 10**9) + b"{"),
            f"--hf-checkpoint: DIR/model.safetensors is not a safetensors file, or is truncated: {AGAIN}",
        ),
        (
            replace_weights("pytorch_model.bin", b""),
            r"--hf-checkpoint DIR has no weights: its .bin files are not read \(they may run code\), convert them with "
            r'python -c "from transformers import .*"',
        ),
        (
            adapter,
            "--hf-checkpoint DIR holds a LoRA adapter of Qwen/Qwen3-0.6B: give its base model, and the adapter with "
            "--lora-load to train it further; or merge the two .* and give that folder",
        ),
        (gguf, "model folder DIR has no config.json: its GGUF files are a format for inference: give the folder .*"),
    ],
)
def test_unusable_model_folder_is_rejected_with_a_remedy(
    valid: dict[str, Any], model_dir: Path, spoil: Callable[[Path], None], sentence: str
) -> None:
    spoil(model_dir)
    found = rejection(valid)
    assert re.fullmatch(sentence.replace("DIR", re.escape(str(model_dir))), found), found


def weights_of(vocab: int, hidden: int, layers: int) -> Callable[[Path], None]:
    """Return a function that writes weights of these sizes."""

    def write(folder: Path) -> None:
        shapes = {"model.embed_tokens.weight": [vocab, hidden]}
        for layer in range(layers):
            rows = {"self_attn.q_proj": 2 * 6, "self_attn.k_proj": 6, "mlp.gate_proj": 20}
            shapes |= {f"model.layers.{layer}.{name}.weight": [size, hidden] for name, size in rows.items()}
        header, at = {}, 0
        for name, shape in shapes.items():
            size = 4 * math.prod(shape)
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))

    return write


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_size": 16}, "DIR/config.json has hidden_size 16, but the embedding in the weights has 8: correct .*"),
        ({"vocab_size": 5}, "DIR/config.json has vocab_size 5, but the embedding in the weights has 10: correct .*"),
        (
            {"num_hidden_layers": 3},
            "DIR/config.json has num_hidden_layers 3, but the weights have 2 layers: correct .*",
        ),
        ({"hidden_size": None, "hiden_size": 8}, "DIR/config.json has hiden_size but not hidden_size: correct .*"),
        ({"model_type": None, "modle_type": "qwen3"}, "DIR/config.json has modle_type but not model_type: correct .*"),
        ({"num_hidden_layers": 1}, None),
        (
            {"intermediate_size": 24},
            r"model.layers.0.mlp.gate_proj.weight in DIR has shape \(20, 8\), but its config.json requires \(24, 8\) "
            r"\(intermediate_size 24\): correct it, or take config and weights of the same model",
        ),
        (
            {"num_attention_heads": 4},
            r"model.layers.0.self_attn.q_proj.weight in DIR has shape \(12, 8\), but its config.json requires \(24, 8\) "
            r"\(num_attention_heads 4, head_dim 6\): correct it, .*",
        ),
        (
            {"num_key_value_heads": 2},
            r"model.layers.0.self_attn.k_proj.weight in DIR has shape \(6, 8\), .* \(12, 8\) .*",
        ),
        ({"head_dim": 4}, r"model.layers.0.self_attn.q_proj.weight in DIR has shape \(12, 8\), .* \(8, 8\) .*"),
        ({"head_dim": None}, None),  # qwen3 has its own default
        (
            {"head_dim": None, "model_type": "llama"},
            r"model.layers.0.self_attn.q_proj.weight .* requires \(8, 8\) \(num_attention_heads 2, head_dim 4\): .*",
        ),
        ({"head_dim": 4, "model_type": "own"}, None),
        ({"intermediate_size": [24, 24]}, None),
        ({"hidden_sizes": [1, 2]}, None),
    ],
)
def test_config_json_that_contradicts_the_weights_is_rejected(
    valid: dict[str, Any], model_dir: Path, changes: dict[str, Any], sentence: str | None
) -> None:
    facts = {"model_type": "qwen3", "vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 2, "head_dim": 6}
    facts |= {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 20, **changes}
    known = {name: value for name, value in facts.items() if value is not None}
    (model_dir / "config.json").write_text(json.dumps(known))
    weights_of(10, 8, 2)(model_dir)
    if sentence is None:
        resolve(Config(**valid))
        return
    found = rejection(valid)
    assert re.fullmatch(sentence.replace("DIR", re.escape(str(model_dir))), found), found


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-0.6B"])
def test_hub_model_name_error_includes_the_download_command(name: str, valid: dict[str, Any]) -> None:
    target = f"models/{name.rpartition('/')[2]}"
    assert f"hf download {name} --local-dir {target} and --hf-checkpoint {target}" in rejection(
        valid, hf_checkpoint=name
    )


def test_resolve_rejects_unreadable_data_files(valid: dict[str, Any], tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    table.write_text("input,label\n1,2\n")
    assert rejection(valid, prompt_data=str(table)) == (
        f"--prompt-data: {table} ends in '.csv': convert it to .jsonl or .parquet"
    )
    hint = "hf download openai/gsm8k --repo-type dataset --local-dir data/gsm8k"
    assert hint in rejection(valid, prompt_data="openai/gsm8k")
    assert "hf download" not in rejection(valid, prompt_data="data/rows.jsonl")
    evaluated = {"eval_prompt_data": [("a", str(table))], "eval_interval": 1}
    assert rejection(valid, **evaluated) == (
        f"--eval-prompt-data a: {table} ends in '.csv': convert it to .jsonl or .parquet"
    )


def test_files_read_by_user_functions_may_have_any_suffix(valid: dict[str, Any], tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    table.write_text("input,label\n1,2\n")
    mine = tmp_path / "mine.py"
    mine.write_text(
        "class Source:\n    def get_samples(self, num_samples): return []\n\n"
        "def evaluate(args, rollout_id, data_source, evaluation=False): pass\n"
    )
    resolve(Config(**{**valid, "prompt_data": str(table)}, data_source_path=f"{mine}:Source"))
    listed = tmp_path / "sets.yaml"
    listed.write_text(f"train: {{datasets: {{a: {table}}}}}")
    mixed = {**valid, "prompt_data": None, "prompt_config": str(listed)}
    resolve(Config(**mixed, data_source_path=f"{mine}:Source"))
    evaluated = {"eval_prompt_data": [("a", str(table))], "eval_interval": 1}
    resolve(Config(**valid, **evaluated, eval_function_path=f"{mine}:evaluate"))
    missing = {**valid, "prompt_data": str(tmp_path / "no.csv")}
    assert "there is no file" in rejection(missing, data_source_path=f"{mine}:Source")


def test_complete_shards_are_accepted(valid: dict[str, Any], model_dir: Path) -> None:
    make_shards(model_dir)
    resolve(Config(**valid))
    (model_dir / "model-00002-of-00002.safetensors").unlink()
    add_weights(model_dir)  # a single file takes precedence over a leftover index
    resolve(Config(**valid))


def test_gguf_file_and_hub_name_are_rejected_with_a_remedy(valid: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "q4.gguf").write_bytes(b"GGUF")
    assert "q4.gguf is a GGUF file, a format for inference: give" in rejection(
        valid, hf_checkpoint=str(tmp_path / "q4.gguf")
    )
    assert rejection(valid, hf_checkpoint="Qwen/Qwen3-0.6B") == (
        "there is no model folder Qwen/Qwen3-0.6B: --hf-checkpoint takes the path of a downloaded Hugging Face model; "
        "if this is its name on the hub: hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B and --hf-checkpoint "
        "models/Qwen3-0.6B"
    )


def test_rollout_only_run_with_external_engines_needs_no_weights(valid: dict[str, Any], model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    resolve(Config(**valid, debug_rollout_only=True, rollout_external_engine_addrs=["localhost:1"]))
    assert "has no weights" in rejection(valid, rollout_external_engine_addrs=["localhost:1"])


@pytest.mark.parametrize(
    ("flag", "others"),
    [
        ("ref_load", {"use_kl_loss": True}),
        ("opd_teacher_load", {"use_opd": True, "opd_type": "trainer"}),
        ("critic_hf_checkpoint", {"advantage_estimator": "ppo"}),
        ("load", {}),
    ],
)
def test_every_flag_that_names_a_weight_folder_is_checked(
    valid: dict[str, Any], model_dir: Path, tmp_path: Path, flag: str, others: dict[str, Any]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    add_weights(other)
    (other / "config.json").write_text((model_dir / "config.json").read_text())
    given = {**others, flag: str(other)}
    resolve(Config(**{**valid, **given}))
    truncate_weights(other)
    shown = f"--{flag.replace('_', '-')}"
    assert rejection(valid, **given).startswith(f"{shown}: {other}/model.safetensors has ")
    megatron_names(other)
    if flag not in ("load", "ref_load"):
        assert rejection(valid, **given) == (
            f"model folder {other} has no config.json: it holds checkpoints of a run, {shown} takes a Hugging Face "
            "model folder such as --save-hf writes"
        )


def test_incomplete_checkpoints_are_rejected(valid: dict[str, Any], tmp_path: Path) -> None:
    saved = tmp_path / "ckpt"
    one = saved / "iter_0000003"
    one.mkdir(parents=True)
    resolve(Config(**valid, load=str(saved)))
    (saved / "latest_checkpointed_iteration.txt").write_text("3")
    assert "names iteration '3', which does not exist" in rejection(valid, load=str(saved))
    (one / "meta.json").write_text("{}")
    assert rejection(valid, load=str(saved)) == (
        f"--load: checkpoint {one} has no weights (model-*.safetensors): choose another one"
    )
    write_safetensors(one / "model-00001.safetensors")
    optimizer = write_safetensors(one / "optim-00001.safetensors")
    resolve(Config(**valid, load=str(saved)))
    optimizer.write_bytes(optimizer.read_bytes()[:-2])
    assert rejection(valid, load=str(saved)).startswith(f"--load: {optimizer} has ")
    resolve(Config(**valid, load=str(saved), debug_rollout_only=True))
    (one / "common.pt").write_bytes(b"")
    assert rejection(valid, load=str(saved)).startswith(
        f"--load {saved} is a Megatron checkpoint (torch_dist, {one.name}) without .metadata"
    )


def test_critic_load_may_be_missing_only_if_the_run_saves_there(valid: dict[str, Any], tmp_path: Path) -> None:
    folder = str(tmp_path / "nowhere")
    ppo = {**valid, "advantage_estimator": "ppo"}
    assert rejection(ppo, critic_load=folder) == f"--critic-load: there is no folder {folder}"
    resolve(Config(**ppo, critic_load=folder, critic_save=folder))
    resolve(Config(**ppo, load=folder, save=folder))


def test_conversion_command_for_bin_files_yields_a_valid_folder(valid: dict[str, Any], tmp_path: Path) -> None:
    import torch

    from tests.tiny_models import make_model_folder

    folder = make_model_folder(tmp_path / "old")
    weights = folder / "model.safetensors"
    from safetensors.torch import load_file

    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()
    command = conversion(folder)
    assert rejection(valid, hf_checkpoint=str(folder)).endswith(command)
    exec(command.removeprefix('python -c "').removesuffix('"'), {})
    resolve(Config(**{**valid, "hf_checkpoint": f"{folder}-safetensors"}))
