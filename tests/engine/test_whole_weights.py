"""Weight loading: only complete models, only trusted code, and correct pause and stale states."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.engine.embedded.engine import PAUSE_MODES, EngineCore
from slime.engine.embedded.errors import BadRequest, PartialWrite
from slime.engine.embedded.options import parse_options
from slime.engine.embedded.weights.process_groups import AnnouncedBucket
from slime.models.delta import apply as apply_module
from slime.models.delta.apply import bytes_of, tensor_checksums
from slime.models.delta.blob import TensorDiff, encode
from slime.models.delta.folder import DeltaPart, join_parts, write_part
from tests.tiny_models import make_model_folder

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def load_core(folder: Path, *options: str) -> EngineCore:
    core = EngineCore(parse_options(["--model-path", str(folder), *options]), on_death=lambda error: None)
    core.load("cpu")
    return core


def weights(core: EngineCore) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in core.weights.views.readable().items()}


def drop_tensors(folder: Path, *names: str) -> Path:
    """Remove some tensors from the folder."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({name: t for name, t in tensors.items() if name not in names}, path, metadata={"format": "pt"})
    return folder


def test_rejects_a_folder_with_missing_tensors(qwen3_folder: Path, tmp_path: Path) -> None:
    core = load_core(qwen3_folder)
    before = weights(core)
    save_file({"lm_head.weight": torch.zeros(320, 64)}, tmp_path / "model.safetensors")
    with pytest.raises(BadRequest, match=r"lacks model\.embed_tokens\.weight and \d+ more"):
        core.weights.update_from_folder(str(tmp_path), "1", flush=True)
    assert core.weight_version == "default"
    for name, tensor in weights(core).items():
        assert torch.equal(tensor, before[name]), name


def test_tied_tensors_may_be_stored_under_one_name(tmp_path: Path) -> None:
    tied = {"tie_word_embeddings": True}
    core = load_core(make_model_folder(tmp_path / "first", **tied))
    other = make_model_folder(tmp_path / "other", seed=1, **tied)
    assert "lm_head.weight" not in load_file(other / "model.safetensors")
    core.weights.update_from_folder(str(other), "1", flush=True)
    assert core.weight_version == "1"
    with pytest.raises(BadRequest, match=r"lacks model\.embed_tokens\.weight:"):
        core.weights.update_from_folder(str(drop_tensors(other, "model.embed_tokens.weight")), "2", flush=True)


def test_missing_expert_is_named(tmp_path: Path) -> None:
    core = load_core(make_model_folder(tmp_path / "first", "qwen3_moe", **EXPERTS))
    other = make_model_folder(tmp_path / "other", "qwen3_moe", seed=1, **EXPERTS)
    core.weights.update_from_folder(str(other), "1", flush=True)
    expert = "model.layers.1.mlp.experts.2.up_proj.weight"
    with pytest.raises(BadRequest, match=rf"lacks {expert.replace('.', '[.]')}:"):
        core.weights.update_from_folder(str(drop_tensors(other, expert)), "2", flush=True)
    assert core.weight_version == "1"


def test_partial_files_leave_weights_stale(qwen3_folder: Path, tmp_path: Path) -> None:
    core = load_core(qwen3_folder)
    core.weights.mark_stale("a delta did not fit")
    part = tmp_path / "part.safetensors"
    save_file({"lm_head.weight": torch.zeros(320, 64)}, part)
    core.weights.update_from_files([str(part)], "1", flush=True)
    assert core.weights.stale is not None
    core.weights.update_from_files([str(qwen3_folder / "model.safetensors")], "2", flush=True)
    assert core.weights.stale is None


def test_weights_are_stale_after_a_delta_was_applied_in_part(
    qwen3_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = load_core(qwen3_folder)
    core.weights.update_from_files([str(qwen3_folder / "model.safetensors")], "0", flush=True)
    before = {name: weights(core)[name] for name in ("lm_head.weight", "model.norm.weight")}
    trained = {name: tensor + 1 for name, tensor in before.items()}
    blobs = {n: encode(TensorDiff.between(bytes_of(before[n]), bytes_of(trained[n])), "xor").data for n in before}
    write_part(tmp_path / "rank", blobs, tensor_checksums(trained.items()))
    part = DeltaPart(path=str(tmp_path / "rank"), names=list(blobs))
    join_parts(tmp_path, [part], version=1, base_version=0, encoding="xor", checksum="xxh3-128")
    written, put_bytes = [], apply_module.put_bytes

    def put_the_first_only(target: torch.Tensor, data: Any) -> None:
        if written:
            raise torch.OutOfMemoryError("on purpose")
        written.append(data)
        put_bytes(target, data)

    monkeypatch.setattr(apply_module, "put_bytes", put_the_first_only)
    with pytest.raises(PartialWrite, match="the delta was applied in part: on purpose"):
        core.weights.update_from_folder(str(tmp_path), "1", flush=True)
    assert core.weight_version == "0"
    assert core.weights.stale is not None
    assert "in part" in core.weights.stale


def test_unversioned_updates_do_not_add_up_but_buckets_do(qwen3_folder: Path, tmp_path: Path) -> None:
    core = load_core(qwen3_folder)
    tensors = load_file(qwen3_folder / "model.safetensors")
    parts = [{name: tensors[name] for name in sorted(tensors)[at::2]} for at in range(2)]
    core.weights.mark_stale("a delta did not fit")
    for number, part in enumerate(parts):  # without a version they may belong to two publications
        save_file(part, tmp_path / f"{number}.safetensors")
        core.weights.update_from_files([str(tmp_path / f"{number}.safetensors")], None, flush=True)
    assert core.weights.stale is not None
    for number, part in enumerate(parts, start=1):
        names, shapes = list(part), [tuple(tensor.shape) for tensor in part.values()]
        bucket = AnnouncedBucket("g", names, [torch.float32] * len(names), shapes, number, len(parts))
        core.weights.update_from_group(bucket, part, None, flush=True)
    assert core.weights.stale is None


OWN_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path({noted!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "own_weights"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def add_remote_code(folder: Path, noted: Path) -> Path:
    """Add remote code to the folder that creates the file `noted` when it runs."""
    (folder / "own.py").write_text(OWN_CODE.format(noted=str(noted)))
    config = json.loads((folder / "config.json").read_text()) | {
        "model_type": "own_weights",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def strip_model_prefix(folder: Path) -> dict[str, torch.Tensor]:
    """Rename a folder's tensors to names that only transformers' loader resolves; return them by their own names."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    short = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(short, path, metadata={"format": "pt"})
    return tensors


@pytest.mark.parametrize("home_has_code", [False, True])
def test_remote_code_runs_only_from_the_start_folder(tmp_path: Path, home_has_code: bool) -> None:
    own, foreign = tmp_path / "own_ran", tmp_path / "foreign_ran"
    home = make_model_folder(tmp_path / "home", "llama")
    core = load_core(add_remote_code(home, own) if home_has_code else home, "--trust-remote-code")
    assert own.exists() == home_has_code
    other = add_remote_code(make_model_folder(tmp_path / "other", "llama", seed=1), foreign)
    tensors = strip_model_prefix(other)
    if home_has_code:  # this code reads the other folder's weights
        core.weights.update_from_folder(str(other), "1", flush=True)
        for name, tensor in weights(core).items():
            assert torch.equal(tensor, tensors[name]), name
    else:
        with pytest.raises(BadRequest, match="pass --trust-remote-code"):
            core.weights.update_from_folder(str(other), "1", flush=True)
        assert core.weight_version == "default"
    assert not foreign.exists()


def test_rejects_a_checksum_of_released_weights(qwen3_folder: Path) -> None:
    core = load_core(qwen3_folder)
    before = core.weights.check("checksum")
    core.release_memory(["weights"])
    with pytest.raises(BadRequest, match="the weights are released: call /resume_memory_occupation first"):
        core.weights.check("checksum")
    assert core.weights.check("shapes")["shapes"]["lm_head.weight"] == [320, 64]  # shapes need no weights in memory
    core.resume_memory(["weights"])
    assert core.weights.check("checksum") == before


@pytest.mark.parametrize("mode", PAUSE_MODES)
@pytest.mark.parametrize("fails", [False, True])
def test_self_pausing_update_keeps_the_previous_pause_state(qwen3_folder: Path, mode: str, fails: bool) -> None:
    def load() -> int:
        assert core.paused
        if fails:
            raise BadRequest("broken on purpose")
        return 0

    bucket = AnnouncedBucket("g", [], [], [], 1, 1, None)
    core = load_core(qwen3_folder)
    for is_paused in (True, False):
        if is_paused:
            core.pause("in_place")
        with pytest.raises(BadRequest) if fails else nullcontext():
            core.update(lambda: core.weights.apply(load, "7", flush=False, names=[], bucket=bucket), mode)
        assert core.paused == is_paused
        assert core.weight_version == ("default" if fails else "7")
        core.resume()
