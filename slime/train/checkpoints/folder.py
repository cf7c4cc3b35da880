"""Training checkpoints: exact resume, on any number of ranks.

    <save>/iter_{rollout_id:07d}/model-*.safetensors   float32 master weights, whole tensors
                                 optim-*.safetensors   AdamW moments
                                 ref-*.safetensors     a reference that moves with the policy
                                 rng.safetensors       random state of every rank
                                 meta.json             counters and what model this is
    <save>/latest_checkpointed_iteration.txt           written last

Invariant: a folder named in the latest file is complete, and so is the critic's of the same number. Everything is
written beside it, synced and renamed; the policy's latest file is the one commit point of a policy and its critic, and
nothing older is removed before it. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PretrainedConfig, PreTrainedModel

from slime.config import Config
from slime.config.megatron_folder import LATEST
from slime.data.state_file import state_path
from slime.errors import UserError
from slime.models.loading import persistent_buffers
from slime.models.saving import replace_folder
from slime.models.shards import ShardWriter, fsync_path
from slime.models.sources import Source
from slime.models.taken import FolderTaken
from slime.owned import is_checkpoint
from slime.train.backends.protocol import NamedTensor, TrainBackend
from slime.train.checkpoints.not_written import written_together
from slime.train.checkpoints.saved_tensors import SavedTensors
from slime.train.topology import Ranks

SHARD_BYTES = 1024**3
FORMAT = 1

logger = logging.getLogger(__name__)


@dataclass
class TrainState:
    """Counters that a resumed run continues from; `updates` are the steps in which this model was updated."""

    step: int = 0
    next_rollout_id: int = 0
    updates: int = 0


class CheckpointFolder:
    """One `iter_...` folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def write(
        cls,
        root: Path,
        rollout_id: int,
        backend: TrainBackend,
        state: TrainState,
        config: Config,
        *,
        with_optimizer: bool,
        with_reference: bool = False,
    ) -> Path:
        """A whole folder that nothing names yet: `publish` does. All ranks call it, rank 0 writes.

        A `NotWritten` leaves the ranks in step and nothing half-written.
        """
        target = root / f"iter_{rollout_id:07d}"
        world = backend.topology.world
        random_states = {f"cpu.{rank}": s for rank, s in enumerate(world.gather(torch.get_rng_state()))}
        meta = {
            "format": FORMAT,
            **asdict(state),
            "world_size": world.size,
            "with_optimizer": with_optimizer,
            "model": describe_model(backend),
            "hf_checkpoint": config.hf_checkpoint,
        }
        if backend.adapter is not None:
            meta["lora"] = backend.adapter.to_meta()
        tensors = _prefixed(
            model=backend.full_parameters(),
            optim=backend.full_optimizer_state() if with_optimizer else iter(()),
            ref=backend.full_parameters("ref") if with_reference else iter(()),
        )
        tensors = backend.progress.over(tensors, "writing a checkpoint: tensor")
        write = partial(_write_folder, target, random_states, meta)
        what = f"the checkpoint of rollout {rollout_id} to {target}"
        written_together(world, tensors, write if world.rank == 0 else None, what)
        return target

    def load(self, backend: TrainBackend, config: Config) -> TrainState:
        """Overwrite weights, optimizer and random state; refuses a checkpoint of another model."""
        meta = self._meta()
        check_same_model(self.path, meta["model"], describe_model(backend), config)
        try:
            self._load_parameters(backend)
            if config.no_load_optim:
                logger.warning("--no-load-optim: Adam starts fresh")
            elif meta["with_optimizer"]:
                self._load_optimizer(backend)
            else:
                logger.warning("checkpoint %s has no optimizer state: Adam starts fresh", self.path)
            if not config.no_load_rng:
                self._load_random_state(backend.topology.world.rank)
        except (SafetensorError, OSError) as cause:
            raise UserError(f"checkpoint {self.path} is damaged ({cause}): choose an older iteration") from cause
        updates = meta.get("updates", meta["step"])  # earlier versions counted steps of the critic alone in
        return TrainState(step=meta["step"], next_rollout_id=meta["next_rollout_id"], updates=updates)

    def put_weights_into(self, model: PreTrainedModel, sources: dict[str, Source], config: Config) -> None:
        """Have the weights of a model that are not read yet come from here; refuses a checkpoint of another one."""
        targets = dict([*model.named_parameters(), *persistent_buffers(model)])
        shapes = {name: tuple(tensor.shape) for name, tensor in targets.items()}
        check_same_model(self.path, self._meta()["model"], describe_shapes(model.config, shapes), config, "--ref-load")
        saved = SavedTensors(self.path, "model")
        for name, target in targets.items():
            if name in sources:
                sources[name] = saved.source(name, target.dtype)
            else:
                saved.read_into(name, target)

    def load_reference(self, backend: TrainBackend) -> None:
        """The reference as it had moved; a checkpoint of a run whose reference stood still has none."""
        found = False
        for name, tensor in self._read("ref"):
            backend.load_parameter(name, tensor, "ref")
            found = True
        if not found:
            logger.warning("checkpoint %s has no reference: it starts from --ref-load or --hf-checkpoint", self.path)

    def _meta(self) -> dict[str, Any]:
        try:
            meta: dict[str, Any] = json.loads((self.path / "meta.json").read_text())
        except (OSError, ValueError) as cause:
            raise UserError(f"{self.path}/meta.json cannot be read ({cause}): the checkpoint is damaged") from cause
        if meta.get("format") != FORMAT:
            raise UserError(f"checkpoint {self.path} has format {meta.get('format')!r}; this version reads {FORMAT}")
        return meta

    def _load_parameters(self, backend: TrainBackend) -> None:
        missing = set(backend.parameter_shapes())
        for name, tensor in backend.progress.over(self._read("model"), "reading a checkpoint: tensor", len(missing)):
            backend.load_parameter(name, tensor)
            missing.discard(name)
        if missing:
            raise UserError(f"checkpoint {self.path} lacks {min(missing)}: the checkpoint is damaged")

    def _load_optimizer(self, backend: TrainBackend) -> None:
        pending: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in backend.progress.over(self._read("optim"), "reading the optimizer: tensor"):
            part, name = key.split("/", 1)
            state = pending.setdefault(name, {})
            state[part] = tensor
            if len(state) == 3:
                backend.load_optimizer_state(name, pending.pop(name))
        if pending:
            raise UserError(f"checkpoint {self.path} has half an optimizer state for {min(pending)}: it is damaged")

    def _load_random_state(self, rank: int) -> None:
        with safe_open(self.path / "rng.safetensors", framework="pt") as file:
            if f"cpu.{rank}" in file.keys():  # noqa: SIM118  (the handle is no mapping)
                torch.set_rng_state(file.get_tensor(f"cpu.{rank}"))

    def _read(self, prefix: str) -> Iterator[NamedTensor]:
        return iter(SavedTensors(self.path, prefix))


def publish(written: Sequence[Path], ranks: Ranks, *, keep_count: int | None) -> None:
    """Name whole checkpoints as the latest, the policy's last: a resumed run goes by that one. Then remove old ones."""

    def name_all(_: Iterator[Any]) -> None:
        for target in written:
            _write_latest(target.parent, int(target.name.removeprefix("iter_")))

    is_writer = ranks.rank == 0
    written_together(ranks, iter(()), name_all if is_writer else None, f"the name of the checkpoint {written[-1]}")
    if is_writer:
        for target in written:
            _remove_old(target.parent, keep_count, keep=target)
    ranks.barrier()


def describe_model(backend: TrainBackend) -> dict[str, Any]:
    return describe_shapes(backend.model_config, backend.parameter_shapes())


def describe_shapes(config: PretrainedConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    return {
        "model_type": config.model_type,
        "parameters": sum(torch.Size(shape).numel() for shape in shapes.values()),
        "shapes": {name: list(shape) for name, shape in sorted(shapes.items())},
    }


def check_same_model(
    path: Path, saved: dict[str, Any], current: dict[str, Any], config: Config, flag: str = "--load"
) -> None:
    if saved == current:
        return
    names = sorted(set(saved["shapes"]) | set(current["shapes"]))
    name = next((n for n in names if saved["shapes"].get(n) != current["shapes"].get(n)), "model_type")
    raise UserError(
        f"{flag} {path} holds a {saved['model_type']} model of {saved['parameters']:,} parameters, but --hf-checkpoint "
        f"{config.hf_checkpoint} is a {current['model_type']} model of {current['parameters']:,} (first difference: "
        f"{name} {saved['shapes'].get(name)} against {current['shapes'].get(name)}): load one of the same model"
    )


def _prefixed(**streams: Iterator[NamedTensor]) -> Iterator[tuple[str, NamedTensor]]:
    """All tensors one by one, each with the prefix of the files it belongs to."""
    for prefix, tensors in streams.items():
        for pair in tensors:
            yield prefix, pair


def _write_folder(
    target: Path,
    random_states: dict[str, torch.Tensor],
    meta: dict[str, Any],
    tensors: Iterator[tuple[str, NamedTensor]],
) -> None:
    """Write everything beside `target`, a shard at a time, and put it there when it is whole."""
    staging = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    if target.exists() and not is_checkpoint(target):
        raise FolderTaken(f"{target} is no checkpoint of a run, or has more in it: move it away")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        for prefix, members in groupby(tensors, key=itemgetter(0)):
            writer = ShardWriter(staging, prefix=prefix, max_bytes=SHARD_BYTES, dtype=None)
            for _, (name, tensor) in members:
                writer.add(name, tensor)
            writer.finish()
        save_file(random_states, staging / "rng.safetensors")
        (staging / "meta.json").write_text(json.dumps(meta, indent=2))
        for file in staging.iterdir():
            fsync_path(file)
        fsync_path(staging)
        replace_folder(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _write_latest(root: Path, rollout_id: int) -> None:
    draft = root / f".{LATEST}.tmp"
    draft.write_text(f"{rollout_id}\n")
    fsync_path(draft)
    os.replace(draft, root / LATEST)
    fsync_path(root)


def _remove_old(root: Path, keep_count: int | None, *, keep: Path) -> None:
    """Delete all but the newest `keep_count` checkpoints and their data positions, and leftovers of broken writes.

    Only what a run wrote: a folder of that name that is no checkpoint, or has more in it, stays and does not count.
    """
    for leftover in root.iterdir():
        if re.fullmatch(r"\.iter_\d{7,}\.tmp-\d+", leftover.name):
            shutil.rmtree(leftover, ignore_errors=True)
    if keep_count is None:
        return
    found = sorted(p for p in root.iterdir() if re.fullmatch(r"iter_\d{7,}", p.name) and is_checkpoint(p))
    for old in found[: max(len(found) - keep_count, 0)]:
        if old != keep:
            shutil.rmtree(old, ignore_errors=True)
            state_path(root, int(old.name.removeprefix("iter_"))).unlink(missing_ok=True)
