"""Tests the export of weights sharded in Megatron layouts; the tests shard without Megatron."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from slime.models.dequantized import plain_sources
from slime.models.families.weight_map import ParameterEntry
from slime.models.safetensors_io import open_weights
from slime.models.torch_dist.hugging_face import model_entries
from slime.train.backends.megatron.hf_export import MegatronHfExport
from slime.train.backends.megatron.layout import Layout
from slime.train.backends.megatron.shard_map import ShardMap
from slime.train.topology import Ranks
from slime.train.weight_export.delta import PublishedWeights
from tests.peers import together
from tests.tiny_models import make_model_folder

MAX_BYTES = 20_000
LAYOUTS = {
    "TP2 PP2": {"tensor": 2, "pipeline": 2, "expert_tensor": 2},
    "TP4": {"tensor": 4, "expert_tensor": 4},
    "CP2 TP2": {"tensor": 2, "context": 2, "expert_tensor": 1, "expert": 2},
    "PP2 EP2": {"pipeline": 2, "expert": 2},
    "TP2 EP2 ETP2": {"tensor": 2, "expert": 2, "expert_tensor": 2},
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "qwen2": {"tie_word_embeddings": True},
}


def cut(layout: Layout, rank: int, entries: list[ParameterEntry], whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of one rank of this layout, for a model of two layers and four experts."""
    own, stage = {}, rank // (layout.world // layout.pipeline)
    for entry in entries:
        layer = 0 if "embedding" in entry.megatron else 1 if "decoder.layers" not in entry.megatron else None
        layer = int(entry.megatron.split(".")[2]) if layer is None else layer
        size = layout.expert_tensor if entry.is_expert else layout.tensor
        if layer * layout.pipeline // 2 != stage:
            continue
        if entry.is_expert:
            expert = int(entry.megatron[-1])
            if expert * layout.expert // 4 != rank // layout.expert_tensor % layout.expert:
                continue
        shard = entry.form.shard([tuple(whole[name].shape) for name in entry.hf], rank % size, size)
        own[entry.megatron] = shard.join([whole[entry.hf[share.source]][share.region] for share in shard.shares])
    return own


def export_all(ranks: Ranks, model: str) -> dict[str, Any]:
    folder, answers = Path(model), {}
    entries, _ = model_entries(folder, plain_sources(folder))
    whole = dict(open_weights(folder))
    shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
    for name, sizes in LAYOUTS.items():
        layout = Layout(world=ranks.size, **sizes)
        own = cut(layout, ranks.rank, entries, whole)
        export = MegatronHfExport(ShardMap(layout, ranks, entries, shapes, own), ranks, lambda own=own: own)
        for owners in (None, (0,), (1, 3)):
            planned = export.plan(torch.bfloat16, MAX_BYTES, owners)
            plan = [load.tensors for load in planned]
            found: dict[str, bool] = {}
            for bucket in export.buckets(planned):
                assert (bucket.tensors is None) == (bucket.owner != ranks.rank)
                for key, tensor in (bucket.tensors or {}).items():
                    found[key] = torch.equal(tensor, whole[key].bfloat16())
            answers[f"{name} {owners}"] = (plan, found)
    return answers


def export_three_rounds(ranks: Ranks, model: str) -> list[tuple[int, dict[str, bool]]]:
    """Export three times: all weights, some changed, none changed."""
    folder = Path(model)
    entries, _ = model_entries(folder, plain_sources(folder))
    whole = dict(open_weights(folder))
    shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
    layout = Layout(world=ranks.size, tensor=2, pipeline=2, expert_tensor=1, expert=2)
    published, answers = PublishedWeights(), []
    for turn in range(3):
        if turn == 1:
            for name in ("model.layers.1.self_attn.o_proj.weight", "model.layers.0.mlp.experts.3.up_proj.weight"):
                whole[name].view(-1)[::17] += 1
            whole["model.embed_tokens.weight"] += 1
        own = cut(layout, ranks.rank, entries, whole)
        export = MegatronHfExport(ShardMap(layout, ranks, entries, shapes, own), ranks, lambda own=own: own)
        with counted_sends() as sent:
            found: dict[str, bool] = {}
            for bucket in export.buckets(export.plan(torch.bfloat16, MAX_BYTES), published):
                for key, tensor in (bucket.tensors or {}).items():
                    found[key] = torch.equal(tensor, whole[key].bfloat16())
                published.keep(bucket.tensors or {})
        answers.append((sum(sent), found))
    return answers


@contextmanager
def counted_sends() -> Iterator[list[int]]:
    """Record the sizes of the uint8 messages that this process sends."""
    sizes: list[int] = []
    send = dist.isend

    def counted(tensor: Tensor, *arguments: Any, **more: Any) -> Any:
        sizes.append(tensor.nbytes if tensor.dtype == torch.uint8 else 0)
        return send(tensor, *arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", counted)
        patch.setattr(dist.distributed_c10d, "isend", counted)
        yield sizes


def test_delta_export_sends_only_changed_values(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "model", "qwen3_moe", **MODELS["qwen3_moe"])
    names = set(open_weights(model).names)
    rounds = list(zip(*together(4, export_three_rounds, str(model), folder=tmp_path), strict=True))
    for answers in rounds:
        assert {name for _, found in answers for name in found} == names
        assert all(equal for _, found in answers for equal in found.values())
    whole, some, none = (sum(sent for sent, _ in answers) for answers in rounds)
    assert none == 0
    embedding = 64 * 64 * 2  # the second rank's part of 320 rows, all changed
    places_and_values = (64 * 64 // 2 // 17 + 1) * 6
    assert embedding + places_and_values / 2 < some <= embedding + places_and_values < whole / 5


@pytest.mark.parametrize("kind", MODELS)
def test_each_tensor_is_whole_on_its_owner_only(kind: str, tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "model", kind, **MODELS[kind])
    names = set(open_weights(model).names)
    answers = together(4, export_all, str(model), folder=tmp_path)
    for case in answers[0]:
        plans, found = zip(*(answer[case] for answer in answers), strict=True)
        assert plans[0] == plans[1] == plans[2] == plans[3], case
        assert sum(len(one) for one in found) == len(names), case
        assert {name for one in found for name in one} == names, case
        assert all(equal for one in found for equal in one.values()), case
        used = {rank for rank, one in enumerate(found) if one}
        assert used == ({0} if case.endswith("(0,)") else {1, 3} if case.endswith(")") else {0, 1, 2, 3}), case
        for tensors in plans[0]:
            assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors) <= MAX_BYTES
