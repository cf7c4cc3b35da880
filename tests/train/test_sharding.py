"""Tests the weights and gradients that each rank of a sharded model holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from slime.config.initial_weights import InitialWeights
from slime.train.backends.fsdp.attention import ATTENTION_NAME, register_packed_attention
from slime.train.backends.fsdp.builder import FSDPBuilder, build_sharded_topology
from slime.train.backends.fsdp.packed_model import PolicyModel
from slime.train.backends.fsdp.sharding import gather_full_tensor, local_part, set_gradient_sync, shard
from slime.train.samples.batch import flatten_samples, make_train_batch
from slime.train.samples.micro_batch import LossOutcome, MicroBatch, StepShare, make_micro_batch
from slime.train.timers import RankProgress
from slime.train.topology import Ranks
from tests.peers import together
from tests.train.in_process import config_for, one_rank
from tests.train.tiny_training import make_samples

Folder = Callable[[str], Path]


def make_backend(world: Ranks, folder: str, out: str, **flags: Any) -> Any:
    config = config_for(Path(folder), Path(out), **flags)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
    return FSDPBuilder(config, world, compute_dtype=dtype, progress=RankProgress()).policy(config, InitialWeights())


def make_micro_batches(world: Ranks, folder: str, out: str) -> list[MicroBatch]:
    """Make three micro-batches of three samples; the samples differ by rank."""
    batch = make_train_batch(config_for(Path(folder), Path(out)), flatten_samples(make_samples(3, 3, seed=world.rank)))
    share = StepShare(num_rollouts=9)
    return [make_micro_batch(batch, range(i, i + 3), share, 9, world.device) for i in (0, 3, 6)]


def gradient_elements_held(world: Ranks, folder: str, out: str, flags: dict[str, Any]) -> tuple[list[int], int]:
    """Return the gradient elements on this rank before each backward and after the last, and the parameter count."""
    backend = make_backend(world, folder, out, actor_num_gpus_per_node=world.size, **flags)
    parameters = list(backend.module.parameters())
    held = []

    def objective(micro: MicroBatch, log_probs: Tensor, _entropy: Tensor) -> LossOutcome:
        held.append(sum(local_part(p.grad).numel() for p in parameters if p.grad is not None))
        return LossOutcome(-(log_probs * micro.weights).sum())

    backend.forward_backward(make_micro_batches(world, folder, out), objective)
    held.append(sum(local_part(p.grad).numel() for p in parameters))
    return held, sum(p.numel() for p in parameters)


def test_gradients_stay_sharded_between_micro_batches(model_folder: Folder, tmp_path: Path) -> None:
    folder = str(model_folder("qwen3"))
    for dtype in ("float32", "bfloat16"):
        ranks = together(2, gradient_elements_held, folder, str(tmp_path), {"dtype": dtype}, folder=tmp_path)
        for held, num_parameters in ranks:
            assert held == [0] + [num_parameters // 2] * 3


def test_replicas_reduce_gradients_once_per_step(model_folder: Folder, tmp_path: Path) -> None:
    folder = str(model_folder("qwen3"))
    for sharing in (2, 1):
        ranks = together(
            4, gradient_elements_held, folder, str(tmp_path), {"fsdp_shard_size": sharing}, folder=tmp_path
        )
        for held, num_parameters in ranks:
            assert held == [0, 0, 0, num_parameters // sharing]


class RoutedMlp(nn.Module):
    """An expert layer with one module per expert, as in models with custom code."""

    def __init__(self, mlp: nn.Module, choice: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList([mlp, deepcopy(mlp)])
        self.choice = choice

    def forward(self, hidden: Tensor) -> Tensor:
        return self.experts[self.choice](hidden)


def gradients_of_experts(world: Ranks, folder: str, out: str) -> bool:
    """Return True if the expert used only by this rank has the gradients of this rank's tokens."""
    register_packed_attention()
    packed = PolicyModel(AutoModelForCausalLM.from_pretrained(folder, attn_implementation=ATTENTION_NAME))
    for layer in packed.model.model.layers:
        layer.mlp = RoutedMlp(layer.mlp, choice=world.rank)
    own = f"experts.{world.rank}."
    micro, *_ = make_micro_batches(world, folder, out)
    (packed(micro.row)[0] * micro.weights).sum().backward()
    expected = {name: p.grad.clone() for name, p in packed.named_parameters() if own in name and p.grad is not None}
    packed.zero_grad()
    _, mesh = build_sharded_topology(world, copy_size=world.size)
    shard(packed, mesh, MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32), RankProgress())
    parameters = dict(packed.named_parameters())
    set_gradient_sync(packed, mesh, last=True)
    (packed(micro.row)[0] * micro.weights).sum().backward()
    found = {name: gather_full_tensor(parameter.grad) for name, parameter in parameters.items()}  # a collective
    assert len(expected) == 3 * len(packed.model.model.layers)
    return all(torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-6) for name, gradient in expected.items())


def test_expert_used_by_one_rank_gets_its_gradients(model_folder: Folder, tmp_path: Path) -> None:
    folder = str(model_folder("qwen3"))
    assert together(2, gradients_of_experts, folder, str(tmp_path), folder=tmp_path) == [True, True]


def rank_groups(world: Ranks, copy_size: int, context_size: int) -> dict[str, Any]:
    topology, mesh = build_sharded_topology(world, copy_size=copy_size, context_size=context_size)
    own = torch.tensor([float(world.rank)])
    groups = {"data": topology.data, "context": topology.context, "model": topology.model}
    members = {name: [int(tensor) for tensor in ranks.gather(own)] for name, ranks in groups.items()}
    assert all(members[name][ranks.rank] == world.rank for name, ranks in groups.items() if ranks.size > 1)
    copies = mesh.mesh.reshape(-1, copy_size).tolist()
    total = topology.total(torch.tensor([2.0 ** (world.rank // context_size)]))
    return {**members, "copy": next(copy for copy in copies if world.rank in copy), "total": int(total)}


def test_ranks_are_numbered_by_context_then_shard_then_copy(tmp_path: Path) -> None:
    ranks = together(8, rank_groups, 4, 2, folder=tmp_path)
    assert [found["context"] for found in ranks] == [[r - r % 2, r - r % 2 + 1] for r in range(8)]
    assert [found["data"] for found in ranks] == [[r % 2, r % 2 + 2, r % 2 + 4, r % 2 + 6] for r in range(8)]
    assert [found["copy"] for found in ranks] == [list(range(4))] * 4 + [list(range(4, 8))] * 4
    assert [len(found["model"]) for found in ranks] == [1] * 8
    assert {found["total"] for found in ranks} == {0b1111}  # ranks of one context count once


def gathered_parameter_counts(world: Ranks, folder: str, out: str) -> dict[str, list[int]]:
    """Return parameter counts of policy and reference: total, maximum gathered while a layer runs, gathered after the
    pass, and per layer."""
    backend = make_backend(world, folder, out, actor_num_gpus_per_node=world.size)
    backend.frozen.snapshot("ref")
    found = {}
    for weights, module in (("policy", backend.module), ("ref", backend.frozen.model("ref").model)):
        layers, seen = module.model.model.layers, []
        for layer in layers:
            layer.register_forward_pre_hook(
                lambda *_, layers=layers, seen=seen: seen.append(_whole_in(layers.parameters()))
            )
        assert len(backend.forward(make_micro_batches(world, folder, out), weights=weights)) == 3
        parameters = list(module.parameters())
        found[weights] = [len(parameters), max(seen), _whole_in(parameters), len(list(layers[0].parameters()))]
    return found


def _whole_in(parameters: Iterable[Tensor]) -> int:
    return sum(not isinstance(parameter, DTensor) for parameter in parameters)


def test_forward_pass_leaves_no_gathered_weights(model_folder: Folder, tmp_path: Path) -> None:
    """Otherwise the full model, and each frozen one, stays in memory with its shards until the next pass."""
    for found in together(2, gathered_parameter_counts, str(model_folder("qwen3")), str(tmp_path), folder=tmp_path):
        for _, during, after, in_a_layer in found.values():
            assert 0 < during <= in_a_layer  # one layer at a time
            assert after == 0


def test_frozen_weights_on_a_single_rank_stay_unsharded(model_folder: Folder, tmp_path: Path) -> None:
    found = gathered_parameter_counts(one_rank(), str(model_folder("qwen3")), str(tmp_path))
    assert found["policy"][2] == 0  # trained weights are gathered in the compute dtype and freed
    count, _, whole_after, _ = found["ref"]
    assert whole_after == count
