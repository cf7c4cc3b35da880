"""Short training runs of a real `Trainer` in the processes of a `RankGroup`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open
from torch import Tensor

from slime.config import Config
from slime.data.routed_experts import RouterDimensions
from slime.data.sample import Sample
from slime.train.backends.megatron.backend import MegatronBackend
from slime.train.microbatch_plan import build_schedule
from slime.train.samples.batch import flatten_samples, make_train_batch
from slime.train.samples.dp_shards import rank_shares
from slime.train.topology import Ranks
from slime.train.trainer import Trainer
from tests.train.in_process import config_for
from tests.train.tiny_training import make_samples

ROLLOUTS = 3
COMMON: dict[str, Any] = {"lr": 0.1, "adam_eps": 1.0, "micro_batch_size": 2}
"""adam_eps=1 makes updates proportional to the gradient, so a rounding error cannot become a full-size step."""

Pieces = dict[str, list[tuple[tuple[slice, ...], Tensor]]]


@dataclass(frozen=True)
class Numbers:
    """Metrics of all rollouts, and this rank's pieces of the final weights."""

    metrics: list[dict[str, float]]
    weights: Pieces


def run_layout(folder: Path, out: Path, flags: dict[str, Any]) -> Numbers:
    """Run a Megatron training; every process of the group calls it."""
    assert dist.group.WORLD is not None
    ranks = Ranks.of(dist.group.WORLD, torch.device("cpu"))
    changes = {**COMMON, "train_backend": "megatron", "actor_num_gpus_per_node": ranks.size, **flags}
    try:
        return train(ranks, config_for(folder, out, **changes))
    finally:
        parallel_state.destroy_model_parallel()


def train(ranks: Ranks, config: Config) -> Numbers:
    trainer = Trainer(config, "cpu")
    trainer.init(ranks)
    metrics = [one for rollout_id in range(ROLLOUTS) for one in train_rollout(trainer, config, rollout_id)]
    backend = trainer.actor.backend
    assert isinstance(backend, MegatronBackend)
    return Numbers(metrics, own_pieces(backend))


def run_with_skipped_step(folder: Path, out: Path, flags: dict[str, Any]) -> tuple[list[float], Numbers, Numbers]:
    """Train with an infinite gradient in the second step, then without that step; return skip flags and results."""
    assert dist.group.WORLD is not None
    ranks, found, skipped = Ranks.of(dist.group.WORLD, torch.device("cpu")), [], []
    changes = {**COMMON, "train_backend": "megatron", "actor_num_gpus_per_node": ranks.size, **flags}
    config = config_for(folder, out, disable_rewards_normalization=True, **changes)
    for spoils in (True, False):
        try:
            trainer, metrics = Trainer(config, "cpu"), []
            trainer.init(ranks)
            for rollout_id in range(ROLLOUTS):
                reward = 1e30 if rollout_id == 1 else None
                if spoils or reward is None:
                    metrics += train_rollout(trainer, config, rollout_id, reward)[:1]
            backend = trainer.actor.backend
            assert isinstance(backend, MegatronBackend)
            found.append(Numbers(metrics, own_pieces(backend)))
            skipped += [one["train/skipped_steps"] for one in metrics if spoils]
        finally:
            parallel_state.destroy_model_parallel()
    return skipped, found[0], found[1]


def train_rollout(
    trainer: Trainer, config: Config, rollout_id: int, first_reward: float | None = None
) -> list[dict[str, float]]:
    """Train on one rollout; return the metrics of each step, then those of the rollout."""
    data, samples = trainer.topology.data, flatten_samples(samples_for(config, rollout_id))
    if first_reward is not None:
        samples[0].reward = first_reward
    batch = make_train_batch(config, samples)
    count = len(set(batch.rollout_ids))
    schedule = build_schedule(
        batch.total_lengths,
        batch.rollout_ids,
        num_ranks=data.size,
        global_batch_size=-(-count // (config.num_steps_per_rollout or 1)),
        micro_batch_size=config.micro_batch_size,
        trainable=batch.trainable,
        fill_last=True,
    )
    result = trainer.train(rollout_id, rank_shares(batch, schedule)[data.rank])
    rollout = {name: value for name, value in result["rollout_metrics"].items() if not name.startswith("perf/")}
    return [*result["metrics"], rollout]


def samples_for(config: Config, rollout_id: int) -> list[list[Sample]]:
    """Samples that are the same for every layout; with random routed experts if rollout routing replay is on."""
    groups = make_samples(3, 3, seed=rollout_id)
    if not config.use_rollout_routing_replay:
        return groups
    routed = RouterDimensions.of(str(config.hf_checkpoint))
    assert routed is not None
    generator = np.random.default_rng(rollout_id)
    for sample in flatten_samples(groups):
        drawn = generator.random((sample.total_length - 1, routed.num_layers, routed.num_experts))
        sample.rollout_routed_experts = np.argsort(drawn, axis=-1)[..., : routed.topk].astype(np.uint8)
    return groups


def own_pieces(backend: MegatronBackend) -> Pieces:
    """This rank's regions of the folder's tensors, according to the family's weight map."""
    pieces: Pieces = {}
    for name, tensor in backend.tensors().items():
        entry = backend.folder.entries[name]
        shard = backend.folder.shard(entry, backend.groups)
        for share, part in zip(shard.shares, shard.split(tensor.detach()), strict=True):
            pieces.setdefault(entry.hf[share.source], []).append((share.region, part.clone()))
    return pieces


def folder_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
