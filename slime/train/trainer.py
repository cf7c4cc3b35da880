"""One training rank: its models, their optimizers, and the methods that the driver calls.

Invariant: all ranks call each method together with the same arguments, except for the data; the returned metrics are
those of the whole batch, equal on every rank.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slime.algorithms.reduce import weighted_sum
from slime.cluster.devices import resolve_dtype, resolve_rollout_dtype
from slime.config import Config
from slime.config.algorithm import has_critic
from slime.config.parallelism import shares_prompts, uses_megatron
from slime.config.plugins import load_function
from slime.config.plugins.tracking import forward_metrics_to
from slime.config.plugins.view import plugin_args, set_plugin_args
from slime.errors import UserError
from slime.models.peft_adapter import write_adapter
from slime.models.shape import count_parameters
from slime.storage.json_types import JsonObject
from slime.train.actor import OTHER_MODELS, Actor, Critic
from slime.train.backend import POLICY, Builder
from slime.train.backends.attention import prepare_attention
from slime.train.checkpoints.writer import BackgroundSave, begin, commit
from slime.train.losses.advantages import set_advantages
from slime.train.offload import TrainerOffload
from slime.train.samples.dp_shards import Share, open_share
from slime.train.samples.micro_batch import MicroBatch, StepShare, make_micro_batch
from slime.train.samples.rollout_data import (
    PER_TOKEN,
    RolloutData,
    check_columns_finite,
    collect,
    dump_rows,
    make_rollout_data,
)
from slime.train.timers import RankProgress, Timers
from slime.train.topology import Ranks
from slime.train.verbs import Needs, verb
from slime.train.weight_export.files import save_hf
from slime.train.weight_export.sender import WeightSender


def make_builder(config: Config, world: Ranks, *, compute_dtype: torch.dtype, progress: RankProgress) -> Builder:
    """Choose the backend that the flags select and form its groups of ranks; all ranks call it together."""
    if uses_megatron(config):
        from slime.train.backends.megatron.builder import MegatronBuilder

        return MegatronBuilder(config, world, compute_dtype=compute_dtype, progress=progress)
    from slime.train.backends.fsdp.builder import FSDPBuilder

    return FSDPBuilder(config, world, compute_dtype=compute_dtype, progress=progress)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
POSTPROCESS = "--rollout-data-postprocess-path"


class Trainer:
    """The state of one rank in its worker process; `init` must be called before the other methods.

    `names` maps paths of model folders on this node to those on the driver's machine, which checkpoints contain.
    """

    def __init__(
        self,
        config: Config,
        device: str,
        progress: RankProgress | None = None,
        *,
        names: Mapping[str, str] | None = None,
    ) -> None:
        if config.hf_checkpoint is None:
            raise UserError("--hf-checkpoint: training needs the path of a Hugging Face model folder")
        self.config = config
        self.names = dict(names or {})
        self.progress = progress or RankProgress()
        self.background: BackgroundSave | None = None
        self.device_name = device
        parameters = count_parameters(config.hf_checkpoint)
        self.dtype = DTYPES[resolve_dtype(config.dtype, device, parameters)]
        self.rollout_dtype = DTYPES[resolve_rollout_dtype(config.rollout_dtype, config.dtype, device, parameters)]

    def init(self, ranks: Ranks) -> dict[str, int]:
        """Load the models, resume from `--load`; return the first rollout id and the data-parallel rank and size."""
        config = self.config
        self.ranks = ranks
        local_rank = ranks.rank % (config.actor_num_gpus_per_node or 1)
        set_plugin_args(config, rank=ranks.rank, local_rank=local_rank, world_size=ranks.size)
        builder = make_builder(config, ranks, compute_dtype=self.dtype, progress=self.progress)
        self.topology = builder.topology
        self.timers = Timers(self.ranks.device)
        seed = config.seed + self.ranks.rank
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        prepare_attention(ranks.device, self.dtype)
        self.critic = Critic(config, builder) if has_critic(config) else None
        self.actor = Actor(config, builder)
        self.sender = WeightSender(config, self.actor, dtype=self.rollout_dtype, device=self.device_name)
        self.sleeper: TrainerOffload | None = None
        if config.offload_train and ranks.device.type == "cuda":
            models = [self.actor.backend, *([] if self.critic is None else [self.critic.backend])]
            self.sleeper = TrainerOffload(models, ranks.device)
        begin = self.actor.state.next_rollout_id
        if self.critic is not None and self.critic.state.next_rollout_id != begin:
            raise UserError(
                f"--load, --critic-load: the policy resumes at rollout {begin} and the critic at "
                f"{self.critic.state.next_rollout_id}; give checkpoints of the same rollout"
            )
        first = begin if config.start_rollout_id is None else config.start_rollout_id
        return {"begin": first, "data_rank": self.topology.data.rank, "data_size": self.topology.data.size}

    @verb("nothing")
    def train(self, rollout_id: int, data: Share) -> JsonObject:
        """Run all optimizer steps of one rollout; `data` is this rank's part from `rank_shares`, or its location."""
        config, actor, plans = self.config, self.actor, data["steps"]
        self.timers.clear()
        if self.sleeper is not None:
            self.sleeper.wake()
            self.sleeper.changed()
        self.progress.begin("preparing the samples")
        logged: list[tuple[JsonObject, str]] = []
        with (
            self.timers.measure("train"),
            forward_metrics_to(lambda metrics, step_key: logged.append((metrics, step_key))),
        ):
            # samples as packed micro-batches, and as columns for hooks
            with self.timers.measure("data_preprocess"):
                batch, total_rollouts = open_share(data), sum(plan["num_rollouts"] for plan in plans)
                pack = partial(
                    make_micro_batch,
                    batch,
                    total_rollouts=total_rollouts,
                    device=self.ranks.device,
                    multiple=self.topology.context.size,
                    repeats_routing=config.use_routing_replay,
                    share_prompts=shares_prompts(config),
                )
                steps = []
                for plan in plans:
                    share = StepShare(
                        num_rollouts=plan["num_rollouts"],
                        num_tokens=plan["num_tokens"] if config.loss_aggregation == "token_mean" else None,
                        constant_length=(
                            config.rollout_max_response_len if config.loss_aggregation == "constant" else None
                        ),
                    )
                    steps.append([pack(positions, share) for positions in plan["micro_batches"]])
                columns = make_rollout_data(batch)
            if self.sleeper is not None:
                self.sleeper.load_rest()  # after the samples are on the device
            flat = [micro for step in steps for micro in step]
            # log-probs, values and advantages from before the first update
            warnings = [] if config.loss_type == "sft_loss" else self._prepare(rollout_id, columns, flat, len(steps))
            # updates of the critic, then of the policy
            metrics: list[dict[str, float]] = [{} for _ in steps]
            is_skipped = bool(warnings)
            if not is_skipped and self.critic is not None:
                with self.timers.measure("critic_train"):
                    metrics = self.critic.train(rollout_id, columns, steps, warnings=warnings)
            if is_skipped or (self.critic is not None and rollout_id < config.num_critic_only_steps):
                metrics = [found | actor.idle_step(skipped=is_skipped) for found in metrics]
            else:
                if config.reset_optimizer_states:
                    actor.backend.reset_optimizer_state()
                with self.timers.measure("actor_train"):
                    for step_id, (found, step) in enumerate(zip(metrics, steps, strict=True)):
                        found |= actor.train(rollout_id, columns, step, step_id=step_id, warnings=warnings)
            if not is_skipped:
                for found, plan in zip(metrics, plans, strict=True):
                    found["train/global_batch_size"] = float(plan["num_rollouts"])
            rollout_metrics = self._rollout_metrics(columns, flat)
        actor.finish_rollout(rollout_id)
        if self.sleeper is not None:
            self.sleeper.begin()
        rollout_metrics |= self.timers.metrics(data["num_tokens"])
        answer: JsonObject = {
            "metrics": metrics,
            "rollout_metrics": rollout_metrics,
            "logged": logged,
            "warnings": warnings,
            "is_skipped": is_skipped,
        }
        if config.save_debug_train_data is not None:
            answer["dump"] = dump_rows(columns, rank=self.ranks.rank)
        return answer

    @verb("nothing")
    def sleep(self) -> None:
        """Offload the models to the host to free device memory for the engines (`--offload-train`); no-op on a CPU."""
        if self.sleeper is not None:
            self.progress.begin("moving the model to the host")
            self.sleeper.sleep()

    @verb("nothing")
    def wake(self) -> None:
        """Bring the models back to the device."""
        if self.sleeper is not None:
            self.progress.begin("moving the model to the device")
            self.sleeper.wake()

    @contextmanager
    def awake(self, needs: Needs) -> Iterator[None]:
        """Keep on the device what a verb needs during the context; then offload it again."""
        sleeper = self.sleeper
        if sleeper is None or needs == "nothing":
            yield
            return
        was_asleep = sleeper.is_asleep
        sleeper.wake(with_optimizer=needs == "everything")
        if needs == "everything":
            sleeper.settle()
        try:
            yield
        finally:
            if was_asleep:
                sleeper.sleep()

    @verb("everything")
    def save(self, rollout_id: int, folder: str | None = None, in_background: bool = False) -> str:
        """Write a checkpoint under `--save` or another folder and return its path; raises `NotWritten`.

        With `in_background` it is only started: `finish_save` returns it when it is complete.
        """
        root, critic_root = folder or self.config.save, self.config.critic_save
        if root is None:
            raise UserError("--save: a checkpoint needs a folder; set the flag")
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

    @verb("nothing")
    def finish_save(self, patient: bool) -> str | None:
        """Return the checkpoint in progress, once, when it is complete; None if it is not complete or there is none."""
        if self.background is None:
            return None
        self.progress.begin("writing a checkpoint: tensor")
        saved = self.background.finish(patient=patient, tick=self.progress.tick)
        return None if saved is None else str(saved)

    @verb()
    def save_hf(self, path: str) -> str:
        """Write a Hugging Face folder and return its path; raises `NotWritten`."""
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

    def _prepare(
        self, rollout_id: int, data: RolloutData, micro_batches: list[MicroBatch], num_steps: int
    ) -> list[str]:
        """Compute log-probs, values and advantages before the first update.

        Returns the reasons not to train on the rollout, if the models' numbers for it are not finite.
        """
        config, actor = self.config, self.actor
        passes = [POLICY] if actor.needs_own_log_probs(num_steps) else []
        passes += [other for other in OTHER_MODELS if other in actor.backend.frozen]
        for weights in passes:
            with self.timers.measure("log_probs" if weights == POLICY else f"{weights}_log_probs", brings=True):
                actor.score(weights, data, micro_batches)
        if self.critic is not None:
            with self.timers.measure("values", brings=True):
                collect(data, "values", self.critic.token_values(micro_batches))
        run_dir = config.output_dir or "."
        # `make_train_batch` has checked the samples' own numbers
        if passes or self.critic is not None or config.custom_convert_samples_to_train_data_path is not None:
            names = check_columns_finite(data, self.ranks, rollout_id=rollout_id, run_dir=run_dir)
            if names:
                return [f"rollout {rollout_id}: no update: {'; '.join(names)}; check the tokens, or lower --lr"]
        if not config.disable_compute_advantages_and_returns:
            set_advantages(config, data, self.topology.data)
        path = config.rollout_data_postprocess_path
        if path is not None:
            load_function(path, what=POSTPROCESS, params=("args", "rollout_id", "rollout_data"))(
                plugin_args(config), rollout_id, data
            )
        if names := check_columns_finite(data, self.ranks, rollout_id=rollout_id, run_dir=run_dir):
            raise UserError(
                f"rollout {rollout_id}: {'; '.join(names)}; no update was made: check the rewards and the functions "
                "that change advantages"
            )
        for micro in micro_batches:
            for name in PER_TOKEN:
                if name in data:
                    micro.take(name, data[name])
        return []

    def _rollout_metrics(self, data: RolloutData, micro_batches: list[MicroBatch]) -> dict[str, float]:
        """Average the per-token columns over the rollout."""
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
        names = sorted(self.topology.world.union(sums))  # only the last pipeline stage has log-probs
        if not names:
            return {}
        zero = torch.zeros((), device=self.ranks.device)
        total = self.topology.total(torch.stack([sums.get(name, zero) for name in names])).tolist()
        return {f"rollout/{name}": value for name, value in zip(names, total, strict=True)}
