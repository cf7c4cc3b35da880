"""Tests the weight export: every tensor once, whole on its owner only, equal to the model folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from slime.models import hf_tensor_plan
from slime.models.delta.apply import tensor_checksums
from slime.models.loading import persistent_buffers, split_fused_weights
from slime.models.safetensors_io import open_weights
from slime.train.backends.fsdp.hf_export import HfExport
from slime.train.checkpoints.errors import NotWritten
from slime.train.topology import Ranks
from slime.train.trainer import Trainer
from slime.train.weight_export.files import save_hf
from tests.peers import together
from tests.train.in_process import InProcess, config_for
from tests.train.tiny_training import CONFIGS

Folder = Callable[[str], Path]

BUCKET = 2**14
EXPERT_ROWS = 3 * 2 * 32 * 64 * 2


def in_folder(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype) for name, tensor in open_weights(folder)}


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_single_rank_export_matches_model_folder(
    kind: str, model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_tensor_plan, "ROWS_BYTES", EXPERT_ROWS)
    export = InProcess(config_for(model_folder(kind), tmp_path)).trainer.actor.backend.export
    plan = export.plan(torch.bfloat16, BUCKET)
    buckets = list(export.buckets(plan))
    assert [bucket.layout for bucket in buckets] == [bucket.tensors for bucket in plan]
    found: dict[str, torch.Tensor] = {}
    for bucket in buckets:
        assert bucket.tensors is not None
        assert {t.name: (t.shape, t.dtype) for t in bucket.layout} == {
            name: (tuple(tensor.shape), tensor.dtype) for name, tensor in bucket.tensors.items()
        }
        found |= bucket.tensors
    wanted = in_folder(model_folder(kind), torch.bfloat16)
    assert found.keys() == wanted.keys()
    assert sum(len(bucket.layout) for bucket in buckets) == len(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# several ranks


def make_export(folder: str, size: int, copies: int) -> HfExport:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    shape, names = ((size,), ("shard",)) if copies == 1 else ((copies, size // copies), ("copy", "shard"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    tensors = {**dict(model.named_parameters()), **dict(persistent_buffers(model))}
    return HfExport(
        tensors,
        partial(split_fused_weights, model),
        rank=dist.get_rank(),
        world_size=size,
    )


def export_on_rank(peers: Ranks, folder: str, copies: int, owners: tuple[int, ...] | None) -> dict[str, Any]:
    """Return the tensors this rank receives, the bytes it sends, and its plan."""
    hf_tensor_plan.ROWS_BYTES = EXPERT_ROWS
    torch.set_num_threads(1)
    export = make_export(folder, peers.size, copies)
    sent: list[torch.Tensor] = []
    transfer = dist.batch_isend_irecv

    def counted(operations: list[Any]) -> Any:
        sent.extend(one.tensor for one in operations if one.op is dist.isend)
        return transfer(operations)

    dist.batch_isend_irecv = counted
    own: dict[str, torch.Tensor] = {}
    largest = 0
    plan = export.plan(torch.bfloat16, BUCKET, owners)
    for bucket in export.buckets(plan):
        assert (bucket.tensors is not None) == (bucket.owner == peers.rank)
        own |= bucket.tensors or {}
        largest = max(largest, sum(tensor.nbytes for tensor in bucket.layout) if len(bucket.layout) > 1 else 0)
    return {
        "plan": [[(t.name, t.shape, str(t.dtype), t.owner) for t in load.tensors] for load in plan],
        "checksums": tensor_checksums(own.items()),
        "bytes": sum(tensor.nbytes for tensor in own.values()),
        "sent": sum(tensor.nbytes for tensor in sent),
        "largest": largest,
    }


@pytest.mark.parametrize(
    ("kind", "size", "copies", "owners"),
    [("qwen3_moe", 3, 1, None), ("qwen3", 2, 1, (0,)), ("qwen3_moe", 4, 2, None)],
    ids=["three ranks", "one owner", "two copies of two"],
)
def test_sharded_export_sends_each_tensor_to_its_owner(
    kind: str, size: int, copies: int, owners: tuple[int, ...] | None, model_folder: Folder, tmp_path: Path
) -> None:
    ranks = together(size, export_on_rank, str(model_folder(kind)), copies, owners, folder=tmp_path)
    wanted = in_folder(model_folder(kind), torch.bfloat16)
    total = sum(tensor.nbytes for tensor in wanted.values())
    assert all(rank["plan"] == ranks[0]["plan"] for rank in ranks)
    by_rank = [set(rank["checksums"]) for rank in ranks]
    assert sum(map(len, by_rank)) == len(wanted)
    found = {name: one for rank in ranks for name, one in rank["checksums"].items()}
    assert found == tensor_checksums(wanted.items())
    for number, rank in enumerate(ranks):
        owned = {name for bucket in rank["plan"] for name, _, _, owner in bucket if owner == number}
        assert by_rank[number] == owned
        assert rank["largest"] <= max(BUCKET, EXPERT_ROWS)
    if owners is None:
        assert all(0.5 * total / size < rank["bytes"] < 1.5 * total / size for rank in ranks)
    in_a_copy = size // copies
    assert sum(rank["sent"] for rank in ranks) == pytest.approx(total * (1 - 1 / in_a_copy), rel=0.1)  # in bfloat16


def write_on_rank(peers: Ranks, folder: str, out: str) -> dict[str, Any]:
    """Write engine files and a model folder with a two-rank trainer, then fail on an invalid path."""
    config = config_for(Path(folder), Path(out), update_weight_buffer_size=2**16, actor_num_gpus_per_node=peers.size)
    trainer = Trainer(config, "cpu")
    trainer.init(peers)
    backend = trainer.actor.backend
    written = trainer.sender.export_weights(f"{out}/export", 1)
    how: dict[str, Any] = {"dtype": torch.float32, "buffer_size": 2**16, "max_shard_bytes": 2**17}
    save_hf(backend, folder, f"{out}/hf", **how)
    (Path(out) / f"taken-{peers.rank}").touch()
    with pytest.raises(NotWritten, match="cannot write the Hugging Face folder"):
        save_hf(backend, folder, f"{out}/taken-0/hf", **how)
    with pytest.raises(NotWritten, match="cannot write version 2 of the weights"):
        trainer.sender.export_weights(f"{out}/taken-{peers.rank}/export", 2)
    return {"written": written, "checksums": trainer.sender.weight_checksums()}


def test_each_rank_writes_the_tensors_it_owns(model_folder: Folder, tmp_path: Path) -> None:
    folder = model_folder("qwen3_moe")
    ranks = together(2, write_on_rank, str(folder), str(tmp_path), folder=tmp_path)
    wanted = in_folder(folder, torch.float32)
    files = [set(rank["written"]) for rank in ranks]
    assert all(files)
    assert not files[0] & files[1]
    assert {str(path) for path in (tmp_path / "export").iterdir()} == files[0] | files[1]
    for number, paths in enumerate(files):
        inside = {name for path in paths for name in load_file(path)}
        assert inside == set(ranks[number]["checksums"])
    found = {name: tensor for path in files[0] | files[1] for name, tensor in load_file(path).items()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert ranks[0]["checksums"] | ranks[1]["checksums"] == tensor_checksums(wanted.items())
    # the folder has several files with an index and loads in transformers
    shards = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert shards == [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    assert len(shards) >= 2
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.dtype == torch.float32
    saved = in_folder(tmp_path / "hf", torch.float32)
    assert saved.keys() == wanted.keys()
    assert all(torch.equal(saved[name], wanted[name]) for name in wanted)
    assert not list(tmp_path.glob(".*"))
