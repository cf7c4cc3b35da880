"""Exports of Megatron trainers during training: full weights, deltas, background checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slime.models.delta.apply import apply_to_tensors, tensor_checksums
from slime.models.delta.folder import DeltaPart, delta_entries, join_parts, read_index
from slime.models.safetensors_io import WeightReader, open_weights
from slime.models.saving import ShardWriter
from slime.train.checkpoints import rank_files as checkpoint_parts
from slime.train.checkpoints.errors import NotWritten
from slime.train.checkpoints.reader import SavedTensors
from slime.train.topology import Ranks
from slime.train.trainer import Trainer
from tests.megatron.ranks import RankGroup
from tests.megatron.trainings import COMMON, train_rollout
from tests.train.in_process import config_for

Folder = Callable[[str], Path]
TP = {"tensor_model_parallel_size": 2}
PP = {"pipeline_model_parallel_size": 2}
EP = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tp2 pp2": ("qwen3", 4, {**TP, **PP}),
    "ep2": ("qwen3_moe", 2, EP),
    "dp2": ("llama", 2, {}),
}


def start_trainer(folder: Path, out: Path, flags: dict[str, Any]) -> Trainer:
    assert dist.group.WORLD is not None
    ranks = Ranks.of(dist.group.WORLD, torch.device("cpu"))
    own = {"train_backend": "megatron", "actor_num_gpus_per_node": ranks.size, "save": str(out / "saved")}
    trainer = Trainer(config_for(folder, out, **{**COMMON, **own, **flags}), "cpu")
    trainer.init(ranks)
    return trainer


def export_versions(folder: Path, out: Path, flags: dict[str, Any]) -> dict[str, Any]:
    """Export version 0 in full, version 1 as a delta and as a checkpoint written in the background."""
    try:
        trainer = start_trainer(folder, out, {**flags, "update_weight_mode": "delta", "dtype": "bfloat16"})
        whole = trainer.sender.export_weights(str(out / "v0"), 0)
        train_rollout(trainer, trainer.config, 0)
        (out / "v1").mkdir(exist_ok=True)
        delta = trainer.sender.export_delta(str(out / "v1"), 1, 0)
        checksums, buckets = trainer.sender.weight_checksums(), trainer.sender.weight_buckets()
        trainer.save_hf(str(out / "hf"))
        begun = trainer.save(0, in_background=True)
        train_rollout(trainer, trainer.config, 1)
        assert trainer.finish_save(patient=True) == begun
        return {"whole": whole, "delta": delta, "checksums": checksums, "buckets": buckets}
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_full_export_plus_delta_equals_saved_weights(
    layout: str, model_folder: Folder, ranks: Callable[[int], RankGroup], tmp_path: Path
) -> None:
    kind, size, flags = LAYOUTS[layout]
    answers = ranks(size).run(export_versions, model_folder(kind), tmp_path, flags)
    files = [Path(path) for answer in answers for path in answer["whole"]]
    weights = {name: tensor.clone() for name, tensor in WeightReader(files)}
    original = open_weights(model_folder(kind))
    assert sorted(weights) == sorted(original.names)
    assert all(torch.equal(tensor, original[name].bfloat16()) for name, tensor in weights.items())
    written = [DeltaPart(**answer["delta"]) for answer in answers]
    join_parts(tmp_path / "v1", written, version=1, base_version=0, encoding="sparse", checksum="xxh3-128")
    index = read_index(tmp_path / "v1")
    assert index is not None
    apply_to_tensors(weights, list(delta_entries(tmp_path / "v1", index)), index)
    saved, checkpoint = open_weights(tmp_path / "hf"), SavedTensors(tmp_path / "saved" / "iter_0000000", "model")
    assert any(not torch.equal(weights[name], original[name].bfloat16()) for name in weights)
    for name, tensor in weights.items():
        assert torch.equal(tensor, saved[name]), name
        assert torch.equal(tensor, checkpoint[name].bfloat16()), name
        assert checkpoint[name].dtype == torch.float32
    checksums = {name: value for answer in answers for name, value in answer["checksums"].items()}
    assert checksums == tensor_checksums(weights.items())
    assert all(answer["buckets"] == answers[0]["buckets"] for answer in answers)
    assert sorted(one["name"] for bucket in answers[0]["buckets"] for one in bucket) == sorted(weights)


def fail_to_save(folder: Path, out: Path) -> str:
    """Fail every write of the second rank with a full disk, while the first rank still waits for its moments."""
    try:
        trainer = start_trainer(folder, out, {})
        train_rollout(trainer, trainer.config, 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint_parts, "SHARD_BYTES", 1)
            if trainer.ranks.rank == 1:
                patch.setattr(ShardWriter, "_write", _raise_disk_full)
            with pytest.raises(NotWritten) as caught:
                trainer.save(0)
        trainer.save(0)
        return str(caught.value)
    finally:
        parallel_state.destroy_model_parallel()


def _raise_disk_full(_writer: ShardWriter) -> None:
    raise OSError(28, "No space left on device")


def test_failed_write_raises_on_all_ranks_and_the_next_save_works(
    model_folder: Folder, ranks: Callable[[int], RankGroup], tmp_path: Path
) -> None:
    answers = ranks(2).run(fail_to_save, model_folder("qwen3"), tmp_path)
    assert all("No space left on device" in answer for answer in answers)
    assert (tmp_path / "saved" / "iter_0000000" / "meta.json").is_file()
