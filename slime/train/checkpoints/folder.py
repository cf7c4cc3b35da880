"""Training checkpoints: exact resume, on any number of ranks.

    <save>/iter_{rollout_id:07d}/model-r*-*.safetensors   float32 master weights, each rank its parts
                                 optim-r*-*.safetensors   AdamW moments
                                 ref-r*-*.safetensors     a reference that moves with the policy
                                 rng.safetensors          random state of every rank
                                 meta.json                counters, what model this is, the files
    <save>/latest_checkpointed_iteration.txt              written last

Invariant: a folder named in the latest file is complete, and so is the critic's of the same number; how it gets there:
`slime.train.checkpoints.writer`. Files of the first format have whole tensors and no rank. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig, PreTrainedModel

from slime.config import Config
from slime.errors import UserError
from slime.models.loading import persistent_buffers
from slime.models.tensor_sources import Source
from slime.train.backends.protocol import TrainBackend
from slime.train.checkpoints.rank_files import MODEL, OPTIMIZER
from slime.train.checkpoints.reader import SavedTensors
from slime.train.checkpoints.writer import Draft

FORMATS = (1, 2)
"""That are read; the last is written."""

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
    def draft(
        cls,
        root: Path,
        rollout_id: int,
        backend: TrainBackend,
        state: TrainState,
        config: Config,
        *,
        sets: Sequence[str] = (),
    ) -> Draft:
        """What the folder of a rollout will hold, with these sets of frozen weights; all ranks call it together."""
        world = backend.topology.world
        random_states = {f"cpu.{rank}": s for rank, s in enumerate(world.gather(torch.get_rng_state()))}
        writer = int(world.gather(torch.tensor([os.getpid()]))[0].item())
        with_optimizer = not config.no_save_optim
        meta = {
            "format": FORMATS[-1],
            **asdict(state),
            "world_size": world.size,
            "with_optimizer": with_optimizer,
            "model": describe_model(backend),
            "hf_checkpoint": config.hf_checkpoint,
        }
        if backend.adapter is not None:
            meta["lora"] = backend.adapter.to_meta()
        parts = backend.state_parts([MODEL, *([OPTIMIZER] if with_optimizer else []), *sets])
        return Draft(root / f"iter_{rollout_id:07d}", parts, meta, random_states, writer)

    def load(self, backend: TrainBackend, config: Config, *, sets: Sequence[str] = ()) -> TrainState:
        """Overwrite weights, optimizer, frozen sets and random state; refuses a checkpoint of another model."""
        meta = self._meta()
        check_same_model(self.path, meta["model"], describe_model(backend), config)
        backend.load_parts(MODEL, SavedTensors(self.path, MODEL))
        if config.no_load_optim:
            logger.warning("--no-load-optim: Adam starts fresh")
        elif meta["with_optimizer"]:
            backend.load_parts(OPTIMIZER, SavedTensors(self.path, OPTIMIZER))
        else:
            logger.warning("checkpoint %s has no optimizer state: Adam starts fresh", self.path)
        for name in sets:
            saved = SavedTensors(self.path, name)
            if saved.names:
                backend.load_parts(name, saved)
            else:  # of a run in which it stood still
                logger.warning("checkpoint %s has no %s: it starts from --ref-load or --hf-checkpoint", self.path, name)
        if not config.no_load_rng:
            self._load_random_state(backend.topology.world.rank)
        updates = meta.get("updates", meta["step"])  # earlier versions counted steps of the critic alone in
        return TrainState(step=meta["step"], next_rollout_id=meta["next_rollout_id"], updates=updates)

    def put_weights_into(self, model: PreTrainedModel, sources: dict[str, Source], config: Config) -> None:
        """Have the weights of a model that are not read yet come from here; refuses a checkpoint of another one."""
        targets = dict([*model.named_parameters(), *persistent_buffers(model)])
        shapes = {name: tuple(tensor.shape) for name, tensor in targets.items()}
        check_same_model(self.path, self._meta()["model"], describe_shapes(model.config, shapes), config, "--ref-load")
        saved = SavedTensors(self.path, MODEL)
        for name, target in targets.items():
            if name in sources:
                sources[name] = saved.source(name, target.dtype)
            else:
                saved.read_into(name, target)

    def weight_sources(
        self, model_config: PretrainedConfig, shapes: Mapping[str, tuple[int, ...]], config: Config
    ) -> dict[str, Source]:
        """The weights under the names they have here, in float32; refuses a checkpoint of another model."""
        check_same_model(self.path, self._meta()["model"], describe_shapes(model_config, shapes), config, "--ref-load")
        saved = SavedTensors(self.path, MODEL)
        return {name: saved.source(name, torch.float32) for name in saved.names}

    def _meta(self) -> dict[str, Any]:
        try:
            meta: dict[str, Any] = json.loads((self.path / "meta.json").read_text())
        except (OSError, ValueError) as cause:
            raise UserError(f"{self.path}/meta.json cannot be read ({cause}): the checkpoint is damaged") from cause
        if meta.get("format") not in FORMATS:
            known = " and ".join(map(str, FORMATS))
            raise UserError(f"checkpoint {self.path} has format {meta.get('format')!r}; this version reads {known}")
        return meta

    def _load_random_state(self, rank: int) -> None:
        try:
            with safe_open(self.path / "rng.safetensors", framework="pt") as file:
                if f"cpu.{rank}" in file.keys():  # noqa: SIM118  (the handle is no mapping)
                    torch.set_rng_state(file.get_tensor(f"cpu.{rank}"))
        except (SafetensorError, OSError) as cause:
            raise UserError(f"checkpoint {self.path} is damaged ({cause}): choose an older iteration") from cause


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
    if saved["shapes"].keys() != current["shapes"].keys() and _is_alike(saved, current):
        raise UserError(
            f"{flag} {path} was saved by the other --train-backend, which keeps the weights of experts in other "
            "tensors: make a Hugging Face folder of it with slime convert and give that"
        )
    names = sorted(set(saved["shapes"]) | set(current["shapes"]))
    name = next((n for n in names if saved["shapes"].get(n) != current["shapes"].get(n)), "model_type")
    raise UserError(
        f"{flag} {path} holds a {saved['model_type']} model of {saved['parameters']:,} parameters, but --hf-checkpoint "
        f"{config.hf_checkpoint} is a {current['model_type']} model of {current['parameters']:,} (first difference: "
        f"{name} {saved['shapes'].get(name)} against {current['shapes'].get(name)}): load one of the same model"
    )


def _is_alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[fact] == other[fact] for fact in ("model_type", "parameters"))
