"""One training rank: the model, its optimizer, and what the driver may ask of it.

Invariant: all ranks call each method together with the same arguments apart from the data; the metrics returned are
those of the whole batch, equal on every rank.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime.algorithms.reduce import weighted_sum
from slime.cluster.devices import resolve_dtype, resolve_rollout_dtype
from slime.config import Config
from slime.config.algorithm import has_critic
from slime.config.parallelism import shares_prompts, uses_megatron
from slime.config.plugins import load_function
from slime.config.plugins.tracking import logged_to
from slime.config.plugins.view import plugin_args, tell_plugins
from slime.errors import UserError
from slime.models.peft_adapter import write_adapter
from slime.models.shape import count_parameters
from slime.train.actor import Actor
from slime.train.backends.attention import prepare_attention
from slime.train.backends.protocol import Builder
from slime.train.checkpoints.writer import BackgroundSave, begin, commit
from slime.train.critic import Critic
from slime.train.losses.advantages import set_advantages
from slime.train.offload import Sleeper
from slime.train.samples.batch import TrainBatch
from slime.train.samples.dp_shards import open_share
from slime.train.samples.micro_batch import MicroBatch, StepShare, make_micro_batch
from slime.train.samples.nan_check import check_columns_finite
from slime.train.samples.rollout_data import RolloutData, collect, distribute, make_rollout_data
from slime.train.samples.train_dump import dump_rows
from slime.train.timers import Progress, Timers
from slime.train.topology import Ranks
from slime.train.weight_export.files import save_hf
from slime.train.weight_export.sender import WeightSender, export_adapter

# The backend that the flags ask for; the one place that knows all of them.


def make_builder(config: Config, world: Ranks, *, compute_dtype: torch.dtype, progress: Progress) -> Builder:
    """Forms the groups of ranks; all ranks call it together."""
    if uses_megatron(config):
        from slime.train.backends.megatron.builder import MegatronBuilder

        return MegatronBuilder(config, world, compute_dtype=compute_dtype, progress=progress)
    from slime.train.backends.fsdp.builder import FSDPBuilder

    return FSDPBuilder(config, world, compute_dtype=compute_dtype, progress=progress)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
POSTPROCESS = "--rollout-data-postprocess-path"


class Trainer:
    """Lives in a worker process; `init` first, then any of the others. `names` are those of model folders on the
    driver's machine, by what they are called here; only those stand in checkpoints."""

    def __init__(
        self,
        config: Config,
        device: str,
        progress: Progress | None = None,
        *,
        names: Mapping[str, str] | None = None,
    ) -> None:
        if config.hf_checkpoint is None:
            raise UserError("training needs --hf-checkpoint: the path of a Hugging Face model folder")
        self.config = config
        self.names = dict(names or {})
        self.progress = progress or Progress()
        self.background: BackgroundSave | None = None
        self.device_name = device
        parameters = count_parameters(config.hf_checkpoint)
        self.dtype = DTYPES[resolve_dtype(config.dtype, device, parameters)]
        self.rollout_dtype = DTYPES[resolve_rollout_dtype(config.rollout_dtype, config.dtype, device, parameters)]

    def init(self, ranks: Ranks) -> dict[str, int]:
        """Load the models, resume where `--load` says; the first rollout id to train on, and whose samples it gets."""
        config = self.config
        self.ranks = ranks
        local_rank = ranks.rank % (config.actor_num_gpus_per_node or 1)
        tell_plugins(config, rank=ranks.rank, local_rank=local_rank, world_size=ranks.size)
        builder = make_builder(config, ranks, compute_dtype=self.dtype, progress=self.progress)
        self.topology = builder.topology
        self.timers = Timers(self.ranks.device)
        self.sender = WeightSender(config, dtype=self.rollout_dtype, device=self.device_name)
        _seed_everything(config.seed + self.ranks.rank)
        prepare_attention(ranks.device, self.dtype)
        self.critic = Critic(config, builder) if has_critic(config) else None
        self.actor = Actor(config, builder)
        self.sleeper: Sleeper | None = None
        if config.offload_train and ranks.device.type == "cuda":
            models = [self.actor.backend, *([] if self.critic is None else [self.critic.backend])]
            self.sleeper = Sleeper(models, ranks.device)
        begin = self.actor.state.next_rollout_id
        if self.critic is not None and self.critic.state.next_rollout_id != begin:
            raise UserError(
                f"the policy resumes at rollout {begin} and the critic at {self.critic.state.next_rollout_id}: give "
                "--load and --critic-load checkpoints of the same rollout"
            )
        first = begin if config.start_rollout_id is None else config.start_rollout_id
        return {"begin": first, "data_rank": self.topology.data.rank, "data_size": self.topology.data.size}

    def train(self, rollout_id: int, data: dict[str, Any]) -> dict[str, Any]:
        """All optimizer steps of one rollout; `data` is this rank's part as `rank_shares` cut it, or its file."""
        self.timers.clear()
        if self.sleeper is not None:
            self.sleeper.wake()
            self.sleeper.changed()
        self.progress.begin("preparing the samples")
        logged: list[tuple[dict[str, Any], str]] = []
        with self.timers.measure("train"), logged_to(lambda metrics, step_key: logged.append((metrics, step_key))):
            with self.timers.measure("data_preprocess"):
                data = open_share(data)
                batch = TrainBatch.from_message(data["batch"])
                steps = self._micro_batches(batch, data["steps"])
                columns = make_rollout_data(batch)
            if self.sleeper is not None:
                self.sleeper.bring_rest()  # with the samples on the device
            flat = [micro for step in steps for micro in step]
            warnings = [] if self.config.loss_type == "sft_loss" else self._prepare(rollout_id, columns, steps)
            counts = [plan["num_rollouts"] for plan in data["steps"]]
            is_skipped = bool(warnings)
            if is_skipped:
                metrics = [self.actor.idle_step(skipped=True) for _ in steps]
            else:
                metrics = self._optimize(rollout_id, columns, steps, counts, warnings)
            rollout_metrics = self._rollout_metrics(columns, flat)
        self.actor.finish_rollout(rollout_id)
        if self.sleeper is not None:
            self.sleeper.begin()
        rollout_metrics |= self.timers.metrics(data["num_tokens"])
        answer: dict[str, Any] = {
            "metrics": metrics,
            "rollout_metrics": rollout_metrics,
            "logged": logged,
            "warnings": warnings,
            "is_skipped": is_skipped,
        }
        if self.config.save_debug_train_data is not None:
            answer["dump"] = dump_rows(columns, rank=self.ranks.rank)
        return answer

    def sleep(self) -> None:
        """Give the device's memory to the engines (`--offload-train`); nothing to do on a CPU."""
        if self.sleeper is not None:
            self.progress.begin("moving the model to the host")
            self.sleeper.sleep()

    def wake(self) -> None:
        """Take it again."""
        if self.sleeper is not None:
            self.progress.begin("moving the model to the device")
            self.sleeper.wake()

    @contextmanager
    def awake(self, *, whole: bool) -> Iterator[None]:
        """Within, the model is on the device, the `whole` of it or without the optimizer; it goes on sleeping after."""
        sleeper = self.sleeper
        if sleeper is None:
            yield
            return
        was_asleep = sleeper.is_asleep
        sleeper.wake(with_optimizer=whole)
        if whole:
            sleeper.settle()
        try:
            yield
        finally:
            if was_asleep:
                sleeper.sleep()

    def save(self, rollout_id: int, folder: str | None = None, in_background: bool = False) -> str:
        """A checkpoint under `--save`, or under another folder; its path, or a `NotWritten`.

        With `in_background` it is only begun: `finish_save` says when it is whole.
        """
        root, critic_root = folder or self.config.save, self.config.critic_save
        if root is None:
            raise UserError("saving a checkpoint needs --save: the folder to write it to")
        self.progress.begin("writing a checkpoint: tensor")
        drafts = [self.actor.draft(rollout_id, Path(root))]
        if self.critic is not None:
            own = critic_root if critic_root is not None and folder is None else Path(root) / "critic"
            drafts.insert(0, self.critic.draft(rollout_id, Path(own)))
        for draft in drafts:
            for facts, name in ((draft.meta, "hf_checkpoint"), (draft.meta.get("lora", {}), "base")):
                if name in facts:
                    facts[name] = self.names.get(facts[name], facts[name])
        if in_background:
            self.background = self.background or BackgroundSave(self.ranks)
            self.background.start(drafts, keep_count=self.config.ckpt_keep)
        else:
            begin(drafts, self.ranks)
            commit(drafts, self.ranks, keep_count=self.config.ckpt_keep, added=lambda _: self.progress.tick())
        return str(drafts[-1].target)

    def finish_save(self, patient: bool) -> str | None:
        """The checkpoint that was begun, when it is whole, once; None while it is not, or there is none."""
        if self.background is None:
            return None
        self.progress.begin("writing a checkpoint: tensor")
        saved = self.background.finish(patient=patient, tick=self.progress.tick)
        return None if saved is None else str(saved)

    def export_weights(self, out_dir: str, version: int) -> list[str]:
        """HF-named safetensors files for the engines: those that this rank wrote."""
        self.actor.remember_exported(version)
        return [str(path) for path in self.sender.export(self.actor.backend, Path(out_dir), version=version)]

    def export_delta(self, out_dir: str, version: int, base_version: int) -> dict[str, Any]:
        """This rank's share of what changed since `base_version`, as a file of blobs."""
        self.actor.remember_exported(version)
        return self.sender.export_delta(self.actor.backend, Path(out_dir), version=version, base_version=base_version)

    def weight_buckets(self) -> list[list[dict[str, Any]]]:
        """Name, dtype and shape of each tensor in each bucket that `broadcast_weights` sends."""
        return self.sender.buckets(self.actor.backend)

    def join_engines(self, **meeting_point: Any) -> None:
        """Rank 0 waits for the engines in a process group; the other ranks have nothing to do with them."""
        if self.ranks.rank == 0:
            self.sender.join(**meeting_point)

    def broadcast_weights(self, version: int) -> None:
        """Send all buckets to the engines that joined."""
        self.actor.remember_exported(version)
        self.sender.broadcast(self.actor.backend)

    def export_adapter(self, out_dir: str, version: int) -> list[str]:
        """The files of the LoRA adapter, written by rank 0 (the others return nothing)."""
        self.actor.remember_exported(version)
        return [str(path) for path in export_adapter(self.actor.backend, Path(out_dir), version=version)]

    def adapter_buckets(self) -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
        """The adapter's facts, and name, dtype and shape of each tensor in each bucket of its broadcast."""
        return self.sender.adapter_buckets(self.actor.backend)

    def broadcast_adapter(self, version: int) -> None:
        """Send the adapter to the engines that joined."""
        self.actor.remember_exported(version)
        self.sender.broadcast_adapter(self.actor.backend)

    def share_bucket(self, number: int, version: int, region: str | None) -> dict[str, Any]:
        """Weights in memory that engines open (`slime.train.weight_export.ipc`)."""
        if number == 1:
            self.actor.remember_exported(version)
        return self.sender.shared.share(self.actor.backend, number, region)

    def stop_sharing(self) -> None:
        """The engines have all buckets."""
        self.sender.shared.stop()

    def leave_engines(self) -> None:
        self.sender.leave()

    def weight_checksums(self) -> dict[str, str]:
        """The xxh3-128 of every tensor that this rank owns, as the engines should have it."""
        return self.sender.checksums(self.actor.backend)

    def save_hf(self, path: str) -> str:
        """A Hugging Face folder; its path, or a `NotWritten`."""
        source, backend = self.config.hf_checkpoint, self.actor.backend
        assert source is not None
        adapter = dict(backend.full_adapter())

        def beside(folder: Path) -> None:
            info = backend.adapter
            if info is not None:
                into, facts = folder / "adapter", info.facts
                write_adapter(into, adapter, facts, base_model=str(info.base), target_modules=info.peft_targets)

        size = self.config.update_weight_buffer_size
        save_hf(backend, source, path, dtype=self.dtype, buffer_size=size, beside=beside)
        return path

    def _micro_batches(self, batch: TrainBatch, plans: list[dict[str, Any]]) -> list[list[MicroBatch]]:
        aggregation = self.config.loss_aggregation
        total_rollouts = sum(plan["num_rollouts"] for plan in plans)
        steps = []
        for plan in plans:
            share = StepShare(
                num_rollouts=plan["num_rollouts"],
                num_tokens=plan["num_tokens"] if aggregation == "token_mean" else None,
                constant_length=self.config.rollout_max_response_len if aggregation == "constant" else None,
            )
            steps.append(
                [
                    make_micro_batch(
                        batch,
                        positions,
                        share,
                        total_rollouts,
                        self.ranks.device,
                        multiple=self.topology.context.size,
                        repeats_routing=self.config.use_routing_replay,
                        share_prompts=shares_prompts(self.config),
                    )
                    for positions in plan["micro_batches"]
                ]
            )
        return steps

    def _prepare(self, rollout_id: int, data: RolloutData, steps: list[list[MicroBatch]]) -> list[str]:
        """Everything that is known before the first update: log-probs, values, advantages.

        Returns why the rollout cannot be trained on, where the models' numbers for it are not finite.
        """
        config, flat = self.config, [micro for step in steps for micro in step]
        self.actor.score(data, flat, num_steps=len(steps), timers=self.timers)
        if self.critic is not None:
            with self.timers.measure("values", brings=True):
                collect(data, "values", self.critic.values(flat))
        run_dir = config.output_dir or "."
        if names := check_columns_finite(data, self.ranks, rollout_id=rollout_id, run_dir=run_dir):
            return [f"rollout {rollout_id}: no update: {'; '.join(names)}; look at the tokens, or lower --lr"]
        if not config.disable_compute_advantages_and_returns:
            set_advantages(config, data, self.topology.data)
        path = config.rollout_data_postprocess_path
        if path is not None:
            load_function(path, what=POSTPROCESS, params=("args", "rollout_id", "rollout_data"))(
                plugin_args(config), rollout_id, data
            )
        if names := check_columns_finite(data, self.ranks, rollout_id=rollout_id, run_dir=run_dir):
            raise UserError(
                f"rollout {rollout_id}: {'; '.join(names)}; nothing was updated: look at the rewards and at the "
                "functions that change advantages"
            )
        distribute(data, flat)
        return []

    def _optimize(
        self,
        rollout_id: int,
        data: RolloutData,
        steps: list[list[MicroBatch]],
        num_rollouts: list[int],
        warnings: list[str],
    ) -> list[dict[str, float]]:
        merged: list[dict[str, float]] = [{} for _ in steps]
        if self.critic is not None:
            with self.timers.measure("critic_train"):
                merged = self.critic.train(rollout_id, data, steps, warnings=warnings)
        if self.critic is None or rollout_id >= self.config.num_critic_only_steps:
            if self.config.reset_optimizer_states:
                self.actor.backend.forget_optimizer_state()
            with self.timers.measure("actor_train"):
                for step_id, (metrics, step) in enumerate(zip(merged, steps, strict=True)):
                    metrics |= self.actor.train(rollout_id, data, step, step_id=step_id, warnings=warnings)
        else:
            merged = [metrics | self.actor.idle_step() for metrics in merged]
        return [
            metrics | {"train/global_batch_size": float(count)}
            for metrics, count in zip(merged, num_rollouts, strict=True)
        ]

    def _rollout_metrics(self, data: RolloutData, micro_batches: list[MicroBatch]) -> dict[str, float]:
        """Means over the rollout of what is known for each token."""
        if self.config.loss_type == "sft_loss":
            return {}
        sums: dict[str, Tensor] = {}
        for micro in micro_batches:
            columns = dict(micro.columns)
            if micro.train_log_probs is not None:
                columns.setdefault("log_probs", micro.train_log_probs)
            for name, column in columns.items():
                part = weighted_sum(column, micro.metric_weights)
                sums[name] = sums[name] + part if name in sums else part
        names = sorted(self.topology.world.union(sums))  # stages before the last have no log-probs of their own
        if not names:
            return {}
        zero = torch.zeros((), device=self.ranks.device)
        total = self.topology.total(torch.stack([sums.get(name, zero) for name in names])).tolist()
        return {f"rollout/{name}": value for name, value in zip(names, total, strict=True)}


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
