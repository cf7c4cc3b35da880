"""The driver's interface to the trainer ranks.

Invariant: samples in, metrics out; this module assigns samples to ranks by the data-parallel size that the ranks
report. Rollouts that do not fill an optimizer step are carried over to the front of the next batch.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from slime.cluster.garbage_collection import gc_paused
from slime.cluster.memory.arena import SharedArena, SharedMemoryFull
from slime.cluster.node import SlotPlacement
from slime.config import Config
from slime.config.algorithm import uses_optional_importance_weights
from slime.config.batch import tokens_per_row
from slime.config.parallelism import shares_prompts
from slime.data.source_state import write_durably
from slime.errors import RunFailed, UserError
from slime.storage.files import is_dump
from slime.storage.json_types import JsonObject
from slime.train.checkpoints.errors import NotWritten
from slime.train.checkpoints.staging import wait_until_latest
from slime.train.flops import FlopsModel
from slime.train.microbatch_plan import PromptGroups, build_schedule
from slime.train.node_paths import config_for_node, driver_paths
from slime.train.processes import DEADLINE_FLAG, RankProcesses
from slime.train.samples.batch import TrainBatch, batch_metrics, flatten_samples, make_custom_batch, make_train_batch
from slime.train.samples.carryover import load_carried, prepend_carried, remove_stale, save_carried
from slime.train.samples.dp_shards import ShardTransfer, rank_shares

DUMP_VERSION = 2

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """The result of training on one rollout.

    `metrics`: one dict per optimizer step (empty if no step was filled); `rollout_metrics`: means and timings;
    `logged`: metrics that plugins logged on rank 0, with the names of their steps; `warnings`: a sentence per step
    without an update, or one for a rollout that was skipped before its first step.
    """

    metrics: list[dict[str, float]]
    rollout_metrics: dict[str, float]
    logged: list[tuple[JsonObject, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


class GradientsNotFinite(RunFailed):
    """Raised when `--max-skipped-steps` optimizer steps or whole rollouts in a row had no update."""


class TrainerGroup:
    """Starts, feeds and stops the trainer processes. `device` is `cpu` or `cuda`."""

    def __init__(
        self, config: Config, *, device: str, run_dir: str | Path, placement: SlotPlacement | None = None
    ) -> None:
        self.config = config
        self.device = device
        self.processes = RankProcesses(config, device=device, run_dir=Path(run_dir), placement=placement)
        self.world_size = self.processes.world_size
        self._here = [slot.node.is_here for slot in self.processes.slots]  # ranks that share memory with the driver
        self._shares_memory = any(self._here)
        self._data_ranks, self._data_size = list(range(self.world_size)), self.world_size  # until `init` returns them
        self._flops: FlopsModel | None = None
        self._arena = SharedArena()
        self._hand_over = ShardTransfer(self._arena)
        self._carried: TrainBatch | None = None
        self._warned_no_room = False
        self._warned_no_log_probs = False
        self._saving: Path | None = None
        self._skipped_in_a_row = 0

    def start(self) -> int:
        """Start all ranks, load the model and carried rollouts; return the first rollout id to train on."""
        config = self.config
        self._arena.clean()
        if (config.balance_data or config.balance_by_flops) and config.hf_checkpoint is not None:
            from slime.models.loading import load_config  # imports torch, which the driver otherwise does not need

            facts = load_config(config.hf_checkpoint, trust_remote_code=config.trust_remote_code)
            self._flops = FlopsModel.from_config(facts)
        meetings = self.processes.launch()
        nodes = {id(slot.node): slot.node for slot in self.processes.slots}
        by_node: dict[int, JsonObject] = {
            key: {"config": config_for_node(node, config).to_dict(), "names": driver_paths(node, config)}
            for key, node in nodes.items()
        }
        params: list[JsonObject] = [
            {**by_node[id(slot.node)], "device": self.device, "meeting": asdict(meeting)}
            for slot, meeting in zip(self.processes.slots, meetings, strict=True)
        ]
        answers = self.processes.call("init", params)
        self._data_ranks, self._data_size = [answer["data_rank"] for answer in answers], answers[0]["data_size"]
        begin = int(answers[0]["begin"])
        if begin and config.load is not None:
            self._carried = load_carried(config.load, begin - 1)
        return begin

    def train(self, rollout_id: int, samples_by_group: Sequence[object], *, last: bool = False) -> TrainResult:
        """Train on one rollout: groups of samples, or groups of fanned-out rollouts.

        Steps have exactly `--global-batch-size` rollouts; the rest is carried over to the next call, unless this is the
        `last`.
        """
        begin, config = time.perf_counter(), self.config
        with gc_paused():
            is_custom = config.custom_convert_samples_to_train_data_path is not None
            convert = make_custom_batch if is_custom else make_train_batch
            fresh = convert(config, flatten_samples(samples_by_group))
            batch = fresh if self._carried is None else prepend_carried(self._carried, fresh)
            if not any(fresh.response_lengths):
                logger.warning(
                    "rollout %d has no response token in any of its %d samples: it is not trained on",
                    rollout_id,
                    len(fresh),
                )
                if self._carried is None or not last:
                    return TrainResult(metrics=[], rollout_metrics=self._metrics_of(fresh))
                batch = self._carried
            self._warn_missing_log_probs(rollout_id, batch)
            batch_size = config.global_batch_size
            if batch_size is None:
                batch_size = -(-len(set(batch.rollout_ids)) // (config.num_steps_per_rollout or 1))
            lengths, costs = batch.total_lengths, None
            if self._flops is not None:
                by_length = {length: self._flops.sequence(length) for length in set(lengths)}
                costs = [by_length[length] for length in lengths]
            schedule = build_schedule(
                lengths,
                batch.rollout_ids,
                num_ranks=self._data_size,
                global_batch_size=batch_size,
                micro_batch_size=config.micro_batch_size,
                max_tokens=tokens_per_row(config),
                trainable=batch.trainable,
                costs=costs,
                by_flops=config.balance_by_flops,
                fill_last=last,
                prompts=PromptGroups(batch.group_indices, batch.prompt_lengths) if shares_prompts(config) else None,
            )
            self._carried = batch.select(schedule.left_over) if schedule.left_over else None
            rollout_metrics = self._metrics_of(fresh)
            shares = rank_shares(batch, schedule)
        prepared = time.perf_counter() - begin
        if not schedule.steps:
            logger.warning(
                "rollout %d is not trained on yet: %d rollouts are waiting, and a step takes --global-batch-size %d",
                rollout_id,
                self._num_carried,
                config.global_batch_size,
            )
            rollout_metrics |= {"perf/data_preprocess_time": prepared, "perf/train_time": prepared}
            return TrainResult(metrics=[], rollout_metrics=rollout_metrics)
        with ExitStack() as stack:
            with gc_paused():
                own = [shares[data_rank] for data_rank in self._data_ranks]
                given = stack.enter_context(self._hand_over.given(own, self._here))
            answers = self.processes.call("train", [{"rollout_id": rollout_id, "data": data} for data in given])
        steps = answers[0]["metrics"]
        self._count_skipped(steps[:1] if answers[0]["is_skipped"] else steps, answers[0]["warnings"])
        rollout_metrics |= answers[0]["rollout_metrics"]
        if config.save_debug_train_data is not None:
            one_each = {rank: answer["dump"] for rank, answer in zip(self._data_ranks, answers, strict=True)}
            write_train_dump(config.save_debug_train_data, rollout_id, list(one_each.values()))
        rollout_metrics["perf/data_preprocess_time"] += prepared
        rollout_metrics["perf/train_time"] += prepared
        return TrainResult(answers[0]["metrics"], rollout_metrics, answers[0]["logged"], answers[0]["warnings"])

    def _count_skipped(self, steps: Sequence[Mapping[str, float]], warnings: Sequence[str]) -> None:
        """Raise GradientsNotFinite after too many skipped steps; a rollout skipped as a whole counts as one step."""
        for step in steps:
            skipped = step.get("train/skipped_steps") or step.get("train/critic-skipped_steps")
            self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
            if self._skipped_in_a_row >= self.config.max_skipped_steps:
                raise GradientsNotFinite(
                    f"--max-skipped-steps: no update {self._skipped_in_a_row} times in a row; the last reason: "
                    f"{warnings[-1]}"
                )

    def _warn_missing_log_probs(self, rollout_id: int, batch: TrainBatch) -> None:
        """Warn once that optional importance weights are left out for a whole rollout."""
        if (
            batch.rollout_log_probs is not None
            or self._warned_no_log_probs
            or not uses_optional_importance_weights(self.config)
        ):
            return
        self._warned_no_log_probs = True
        logger.warning(
            "rollout %d has samples without rollout_log_probs (their generate function sets none), so it is trained on "
            "without importance weights for tokens that older weights sampled, as is every other such rollout; set "
            "them, or set --no-use-tis",
            rollout_id,
        )

    def _metrics_of(self, fresh: TrainBatch) -> dict[str, float]:
        """Compute the rollout metrics that need no forward pass."""
        metrics = batch_metrics(fresh, with_rewards=self.config.loss_type != "sft_loss")
        return metrics | {"rollout/carried_rollouts": float(self._num_carried)}

    def call(self, verb: str, **params: object) -> list[Any]:
        """Call a verb of every rank with the same parameters; return the answers in rank order."""
        return self.processes.call(verb, **params)

    def save(self, rollout_id: int, folder: str | None = None) -> Path:
        """Write carried rollouts, then a checkpoint, under `folder` or `--save`; return the checkpoint's path.

        Only a complete checkpoint is ever resumed from. A `NotWritten` leaves the trainers as they were. With
        `--async-save` the checkpoint in `--save` is still being written: `finish_save` returns it when it is complete.
        """
        if self._saving is not None:
            raise RuntimeError(f"{self._saving} is still being written: call finish_save first")
        in_background = self.config.async_save and folder is None
        folder = folder or self.config.save
        if folder is not None:
            try:
                save_carried(folder, rollout_id, self._carried)
            except OSError as error:
                raise NotWritten(f"cannot write the checkpoint of rollout {rollout_id} to {folder}: {error}") from error
        answers = self.call(
            "save", rollout_id=rollout_id, folder=folder and self._shared(folder), in_background=in_background
        )
        saved = Path(answers[0])
        if in_background:
            self._saving = saved
        elif folder is not None:
            remove_stale(folder)
        return saved

    def finish_save(self, *, patient: bool = True) -> int | None:
        """Return the rollout of the checkpoint in progress, once, when it is complete; None if there is none.

        With `patient`, wait until it is complete. A `NotWritten` leaves the trainers as they were.
        """
        if self._saving is None:
            return None
        try:
            if self.call("finish_save", patient=patient)[0] is None:
                return None
        except NotWritten:
            self._saving = None
            raise
        saved, self._saving = self._saving, None
        remove_stale(saved.parent)
        return int(saved.name.removeprefix("iter_"))

    def save_hf(self, path: str | Path) -> Path:
        """Write a Hugging Face folder; a `NotWritten` leaves the trainers as they were."""
        return Path(self.call("save_hf", path=self._shared(path))[0])

    def stop(self) -> None:
        """Stop all ranks after a checkpoint in progress is complete; safe to call twice and after a failure."""
        saving, self._saving = self._saving, None
        try:
            if saving is not None:
                ranks = self.processes
                wait_until_latest(saving, ranks.names, ranks.all_alive, timeout_s=ranks.deadline_s, flag=DEADLINE_FLAG)
        finally:
            self.processes.stop()
            self._arena.close()

    def __enter__(self) -> TrainerGroup:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    @property
    def is_saving(self) -> bool:
        """True while a checkpoint is in progress that `finish_save` has not returned."""
        return self._saving is not None

    @property
    def is_usable(self) -> bool:
        """True if all ranks run and are in step."""
        return self.processes.are_usable

    def doing(self) -> tuple[str, bool] | None:
        """Return the latest progress report of the call in flight, for a display; None if there is none."""
        return None if (doing := self.processes.doing) is None else (doing, True)

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self.processes.ranks]

    def keep(self, arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Move arrays of samples that will be trained on into memory shared with the ranks.

        Returns the arrays themselves if no rank shares memory with the driver, or if that memory is full.
        """
        if not self._shares_memory:
            return arrays
        try:
            return self._arena.keep(arrays)
        except SharedMemoryFull as error:
            if not self._warned_no_room:
                logger.warning("samples are written for the trainers at each step, not when they finish: %s", error)
            self._warned_no_room = True
            return arrays

    @property
    def _num_carried(self) -> int:
        return 0 if self._carried is None else len(set(self._carried.rollout_ids))

    def _shared(self, folder: str | Path) -> str:
        """Return the path of a folder that all ranks write to; it is absolute if ranks are on other machines."""
        return str(folder) if self.processes.are_here else os.path.abspath(folder)


def write_train_dump(template: str, rollout_id: int, ranks: Sequence[Sequence[JsonObject]]) -> Path:
    """Write the rows of all ranks (`dump_rows`) as JSON lines to the path that the template gives for `{rollout_id}`.

    The file has a header, then a row per sample in the order of indices; it is complete or absent.
    """
    path = Path(template.format(rollout_id=rollout_id))
    if path.exists() and not is_dump(path):
        raise UserError(f"--save-debug-train-data: {path} exists and was not written by a run; choose another path")
    rows = sorted((row for rank in ranks for row in rank), key=lambda row: row["sample_indices"])
    header = {"format": "slime-train-dump", "format_version": DUMP_VERSION, "rollout_id": rollout_id}
    write_durably(path, "".join(json.dumps(entry) + "\n" for entry in (header, *rows)).encode())
    return path
