"""What a rank holds of a sharded model, and when."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from slime.config.start import Start
from slime.train.backends.fsdp.builder import FSDPBuilder
from slime.train.backends.fsdp.sharding import local_part
from slime.train.backends.protocol import Outcome
from slime.train.progress import Progress
from slime.train.samples.batch import flatten_samples, make_train_batch
from slime.train.samples.micro_batch import MicroBatch, StepShare, make_micro_batch
from slime.train.topology import Ranks
from tests.peers import Peers, together
from tests.train.in_process import config_for, one_rank
from tests.train.tiny_training import make_samples

Folder = Callable[[str], Path]


def make_backend(world: Ranks, folder: str, out: str, **flags: Any) -> Any:
    config = config_for(Path(folder), Path(out), **flags)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
    return FSDPBuilder(config, world, compute_dtype=dtype, progress=Progress()).policy(config, Start())


def make_micro_batches(world: Ranks, folder: str, out: str) -> list[MicroBatch]:
    """Three samples for each of three micro-batches; other ones on each rank."""
    batch = make_train_batch(config_for(Path(folder), Path(out)), flatten_samples(make_samples(3, 3, seed=world.rank)))
    share = StepShare(num_rollouts=9)
    return [make_micro_batch(batch, range(i, i + 3), share, 9, world.device) for i in (0, 3, 6)]


def world_of(peers: Peers) -> Ranks:
    return Ranks(peers.rank, peers.size, torch.device("cpu"))


def held_between(peers: Peers, folder: str, out: str, flags: dict[str, Any]) -> tuple[list[int], int]:
    """Numbers that the gradients of this rank have before each micro-batch's backward; parameters of the model."""
    world = world_of(peers)
    backend = make_backend(world, folder, out, actor_num_gpus_per_node=world.size, **flags)
    parameters = list(backend.module.parameters())
    held = []

    def objective(micro: MicroBatch, log_probs: Tensor, _entropy: Tensor) -> Outcome:
        held.append(sum(local_part(p.grad).numel() for p in parameters if p.grad is not None))
        return Outcome(-(log_probs * micro.weights).sum())

    backend.forward_backward(make_micro_batches(world, folder, out), objective)
    held.append(sum(local_part(p.grad).numel() for p in parameters))
    return held, sum(p.numel() for p in parameters)


def test_a_rank_holds_its_part_of_the_gradients_after_every_micro_batch(model_folder: Folder, tmp_path: Path) -> None:
    folder = str(model_folder("qwen3"))
    for dtype in ("float32", "bfloat16"):
        ranks = together(2, held_between, folder, str(tmp_path), {"dtype": dtype}, folder=tmp_path)
        for held, num_parameters in ranks:
            assert held == [0] + [num_parameters // 2] * 3


def test_a_pass_without_backward_leaves_nothing_gathered(model_folder: Folder, tmp_path: Path) -> None:
    """Or the whole model, and each frozen one, stays beside its shards until the next pass."""
    world, folder, out = one_rank(), str(model_folder("qwen3")), str(tmp_path)
    backend, micro_batches = make_backend(world, folder, out), make_micro_batches(world, folder, out)
    backend.snapshot("ref")
    frozen = backend._frozen.model("ref").module
    gathered: list[int] = []
    for module in frozen.model.model.layers:
        module.register_forward_pre_hook(
            lambda *_: gathered.append(sum(not isinstance(p, DTensor) for p in frozen.model.model.layers.parameters()))
        )
    for weights, module in (("policy", backend.module), ("ref", frozen)):
        assert len(backend.forward(micro_batches, weights=weights)) == 3
        assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    in_a_layer = sum(1 for _ in frozen.model.model.layers[0].parameters())
    assert gathered
    assert max(gathered) <= in_a_layer  # of a model that is not trained, one layer at a time
