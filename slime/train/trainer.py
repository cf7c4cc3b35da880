"""What one rank does: set up, train on a rollout, save, export.

Invariant: all ranks call the same methods in the same order with their own share of the data; the metrics returned are
those of the whole batch, equal on every rank.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime.algorithms.advantages import grpo_advantages, whiten, whitening_sums
from slime.algorithms.reduce import weighted_sum
from slime.config import Config
from slime.errors import UserError
from slime.models.loading import save_hf_folder
from slime.train.backends.fsdp import FSDPBackend
from slime.train.batch import TrainBatch
from slime.train.checkpoint import CheckpointFolder, TrainState, find_start
from slime.train.distributed import Ranks, join_ranks
from slime.train.export import export_weights, hf_tensors
from slime.train.micro_batch import MicroBatch, StepShare, make_micro_batch
from slime.train.optimizer import LearningRate
from slime.train.policy import PolicyModel
from slime.train.step import LossSettings, train_step

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def compute_dtype(name: str, device: str) -> torch.dtype:
    """`auto` is bfloat16 on CUDA and float32 on the CPU."""
    if name == "auto":
        return torch.bfloat16 if device.startswith("cuda") else torch.float32
    return DTYPES[name]


class Trainer:
    """Lives in a worker process; `init` first, then any of the others."""

    def __init__(self, config: Config, device: str) -> None:
        if config.hf_checkpoint is None:
            raise UserError("training needs --hf-checkpoint: the path of a Hugging Face model folder")
        self.config = config
        self.device_name = device
        self.dtype = compute_dtype(config.dtype, device)
        self.rollout_dtype = self.dtype if config.rollout_dtype == "auto" else DTYPES[config.rollout_dtype]
        self.settings = LossSettings.from_config(config)
        self.state = TrainState()
        self.timers: dict[str, float] = {}

    def init(self) -> int:
        """Join the group, load the model, resume where `--load` says; the first rollout id to train on."""
        config = self.config
        self.ranks: Ranks = join_ranks(self.device_name, timeout_minutes=config.distributed_timeout_minutes)
        _seed_everything(config.seed + self.ranks.rank)
        start = find_start(config)
        self.backend = FSDPBackend(
            config,
            self.ranks,
            compute_dtype=self.dtype,
            model_folder=str(start.hf_folder or config.hf_checkpoint),
            reference_folder=(config.ref_load or config.hf_checkpoint) if config.use_kl_loss else None,
        )
        self.learning_rate = LearningRate.from_config(config)
        if start.checkpoint is not None:
            self.state = CheckpointFolder(start.checkpoint).load(self.backend, config)
        begin = self.state.next_rollout_id
        return begin if config.start_rollout_id is None else config.start_rollout_id

    def train(self, rollout_id: int, data: dict[str, Any]) -> dict[str, Any]:
        """All optimizer steps of one rollout; `data` is this rank's part as `group.TrainerGroup` cut it."""
        self.timers = {}
        with self._timer("train"):
            with self._timer("data_preprocess"):
                steps = self._prepare(data)
            flat = [micro for step in steps for micro in step]
            policy_gradient = self.settings.loss_type == "policy_loss"
            if policy_gradient and len(steps) > 1:
                with self._timer("log_probs"):
                    self._log_prob_pass(self.backend.policy, flat, "old_log_probs")
            if policy_gradient and self.backend.reference is not None:
                with self._timer("ref_log_probs"):
                    self._log_prob_pass(self.backend.reference, flat, "ref_log_probs")
            with self._timer("actor_train"):
                metrics = [
                    self._one_step(step, plan["num_rollouts"]) for step, plan in zip(steps, data["steps"], strict=True)
                ]
            rollout_metrics = self._rollout_metrics(flat) if policy_gradient else {}
        self.state.next_rollout_id = rollout_id + 1
        return {"metrics": metrics, "rollout_metrics": rollout_metrics | self._perf(data["num_tokens"])}

    def save(self, rollout_id: int) -> str:
        if self.config.save is None:
            raise UserError("saving a checkpoint needs --save: the folder to write it to")
        self.state.next_rollout_id = rollout_id + 1
        with_optimizer = not self.config.no_save_optim
        path = CheckpointFolder.write(
            Path(self.config.save), rollout_id, self.backend, self.state, self.config, with_optimizer=with_optimizer
        )
        return str(path)

    def export_weights(self, out_dir: str, version: int) -> list[str]:
        """HF-named safetensors files for the engines, written by rank 0 (the others return nothing)."""
        size = self.config.update_weight_buffer_size
        paths = export_weights(self.backend, Path(out_dir), version=version, dtype=self.rollout_dtype, buffer_size=size)
        return [str(path) for path in paths]

    def save_hf(self, path: str) -> str:
        tensors = hf_tensors(self.backend)
        if self.ranks.rank == 0:
            assert self.config.hf_checkpoint is not None
            save_hf_folder(tensors, self.config.hf_checkpoint, path, self.dtype)
        else:
            for _ in tensors:
                pass
        self.ranks.barrier()
        return path

    def _one_step(self, micro_batches: list[MicroBatch], num_rollouts: int) -> dict[str, float]:
        rate = self.learning_rate.at(self.state.step)
        metrics = train_step(self.backend, micro_batches, self.settings, rate)
        result = {f"train/{name}": value for name, value in metrics.items()}
        result |= {
            "train/lr-pg_0": rate,
            "train/global_batch_size": float(num_rollouts),
            "train/step": float(self.state.step),
        }
        self.state.step += 1
        return result

    def _prepare(self, data: dict[str, Any]) -> list[list[MicroBatch]]:
        batch = TrainBatch.from_dict(data["batch"])
        total_rollouts = sum(plan["num_rollouts"] for plan in data["steps"])
        advantages = grpo_advantages(batch.rewards, batch.response_lengths)
        if self.config.normalize_advantages:
            advantages = self._whitened(advantages, batch)
        steps = []
        for plan in data["steps"]:
            num_tokens = plan["num_tokens"] if self.config.calculate_per_token_loss else None
            share = StepShare(num_rollouts=plan["num_rollouts"], num_tokens=num_tokens)
            steps.append(
                [
                    make_micro_batch(batch, advantages, positions, share, total_rollouts, self.ranks.device)
                    for positions in plan["micro_batches"]
                ]
            )
        return steps

    def _whitened(self, advantages: list[Tensor], batch: TrainBatch) -> list[Tensor]:
        masks = [torch.from_numpy(mask) for mask in batch.loss_masks]
        sums = torch.zeros(3, dtype=torch.float64)
        for values, mask in zip(advantages, masks, strict=True):
            sums += whitening_sums(values, mask)
        count, total, squares = self.ranks.sum(sums.to(self.ranks.device)).cpu()
        return [
            whiten(values.double(), mask, count=count, total=total, squares=squares).float()
            for values, mask in zip(advantages, masks, strict=True)
        ]

    @torch.no_grad()
    def _log_prob_pass(self, model: PolicyModel, micro_batches: list[MicroBatch], target: str) -> None:
        for micro in micro_batches:
            log_probs, _ = model(micro.row, with_entropy=False)
            setattr(micro, target, log_probs)

    def _rollout_metrics(self, micro_batches: list[MicroBatch]) -> dict[str, float]:
        sums: dict[str, Tensor] = {}
        for micro in micro_batches:
            values = {
                "log_probs": micro.old_log_probs if micro.old_log_probs is not None else micro.train_log_probs,
                "ref_log_probs": micro.ref_log_probs,
                "rollout_log_probs": micro.rollout_log_probs,
                "advantages": micro.advantages,
            }
            for name, column in values.items():
                if column is not None:
                    part = weighted_sum(column, micro.metric_weights)
                    sums[name] = sums[name] + part if name in sums else part
        total = self.ranks.sum(torch.stack(list(sums.values()))).tolist()
        return {f"rollout/{name}": value for name, value in zip(sums, total, strict=True)}

    def _perf(self, num_tokens: int) -> dict[str, float]:
        perf = {f"perf/{name}_time": seconds for name, seconds in self.timers.items()}
        perf["perf/actor_train_tok_per_s"] = num_tokens / max(self.timers["actor_train"], 1e-9)
        return perf

    @contextmanager
    def _timer(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        self.timers[name] = time.perf_counter() - begin


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
