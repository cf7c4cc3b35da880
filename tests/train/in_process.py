"""Runs a single-rank trainer in the test process."""

from __future__ import annotations

import atexit
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from slime.config import Config, derive
from slime.train.microbatch_plan import build_schedule
from slime.train.processes import TrainerRendezvous
from slime.train.samples.batch import flatten_samples, make_train_batch
from slime.train.samples.dp_shards import rank_shares
from slime.train.timers import RankProgress
from slime.train.topology import Ranks, join_ranks
from slime.train.trainer import Trainer

_ranks: list[Ranks] = []


def one_rank() -> Ranks:
    """Return the process group of this test process; it is created once per process."""
    if not _ranks:
        group = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        os.environ.update(group)
        meeting = tempfile.TemporaryDirectory(prefix="slime-tests-")
        atexit.register(meeting.cleanup)
        _ranks.append(join_ranks("cpu", meeting=TrainerRendezvous(f"{meeting.name}/store"), timeout_minutes=8))
    return _ranks[0]


def config_for(model: Path, out: Path, **changes: Any) -> Config:
    values: dict[str, Any] = {
        "hf_checkpoint": str(model),
        "rollout_batch_size": 3,
        "n_samples_per_prompt": 3,
        "num_steps_per_rollout": 1,
        "num_rollout": 4,
        "rollout_max_response_len": 16,
        "lr": 1e-3,
        "micro_batch_size": 2,
        "dtype": "float32",
        "output_dir": str(out),
    }
    return derive(Config(**(values | changes)))


class InProcess:
    """Feeds batches to a real `Trainer` as the driver does."""

    def __init__(self, config: Config, progress: RankProgress | None = None) -> None:
        self.config = config
        self.trainer = Trainer(config, "cpu", progress)
        self.start = self.trainer.init(one_rank())["begin"]

    def train(self, rollout_id: int, groups: list[Any]) -> dict[str, Any]:
        batch = make_train_batch(self.config, flatten_samples(groups))
        count = len(set(batch.rollout_ids))
        schedule = build_schedule(
            batch.total_lengths,
            batch.rollout_ids,
            num_ranks=1,
            global_batch_size=-(-count // (self.config.num_steps_per_rollout or 1)),
            micro_batch_size=self.config.micro_batch_size,
            trainable=batch.trainable,
            fill_last=True,
        )
        return self.trainer.train(rollout_id, rank_shares(batch, schedule)[0])

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.trainer.actor.backend.full_parameters()}
