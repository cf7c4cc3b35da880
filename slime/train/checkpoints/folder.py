"""Training checkpoints for exact resume on any number of ranks.

    <save>/iter_{rollout_id:07d}/model-r*-*.safetensors   float32 master weights, the parts of each rank
                                 optim-r*-*.safetensors   AdamW moments
                                 ref-r*-*.safetensors     a reference that is updated
                                 rng.safetensors          random state of every rank
                                 meta.json                counters, description of the model, list of files
    <save>/latest_checkpointed_iteration.txt              written last

Invariant: a folder named in the latest file is complete, and so is the critic's folder of the same number (see
`slime.train.checkpoints.writer`). Files of the first format have whole tensors and no rank. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig, PreTrainedModel

from slime.config import Config
from slime.errors import UserError
from slime.models.loading import persistent_buffers
from slime.models.tensor_sources import Source
from slime.storage.json_types import JsonObject
from slime.train.backend import TrainBackend
from slime.train.checkpoints.rank_files import MODEL, OPTIMIZER
from slime.train.checkpoints.reader import SavedTensors
from slime.train.checkpoints.writer import CheckpointDraft

FORMATS = (1, 2)
"""Formats that can be read; the last one is written."""

logger = logging.getLogger(__name__)


@dataclass
class TrainState:
    """Counters from which a resumed run continues; `updates` counts the steps that updated this model."""

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
    ) -> CheckpointDraft:
        """Prepare the checkpoint of a rollout, with these frozen sets; all ranks call it together."""
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
        return CheckpointDraft(root / f"iter_{rollout_id:07d}", parts, meta, random_states, writer)

    def load(self, backend: TrainBackend, config: Config, *, sets: Sequence[str] = ()) -> TrainState:
        """Load weights, optimizer, frozen sets and random state; raise UserError for a checkpoint of another model."""
        meta = self._meta()
        check_same_model(self.path, meta["model"], describe_model(backend), config)
        backend.load_parts(MODEL, SavedTensors(self.path, MODEL))
        if config.no_load_optim:
            logger.warning("--no-load-optim: Adam starts from zero state")
        elif meta["with_optimizer"]:
            backend.load_parts(OPTIMIZER, SavedTensors(self.path, OPTIMIZER))
        else:
            logger.warning("checkpoint %s has no optimizer state: Adam starts from zero state", self.path)
        for name in sets:
            saved = SavedTensors(self.path, name)
            if saved.names:
                backend.load_parts(name, saved)
            else:  # the run of the checkpoint did not update it
                logger.warning("checkpoint %s has no %s: it starts from --ref-load or --hf-checkpoint", self.path, name)
        if not config.no_load_rng:
            key = f"cpu.{backend.topology.world.rank}"
            try:
                with safe_open(self.path / "rng.safetensors", framework="pt") as file:
                    if key in file.keys():  # noqa: SIM118  (the handle is not a mapping)
                        torch.set_rng_state(file.get_tensor(key))
            except (SafetensorError, OSError) as cause:
                raise UserError(f"checkpoint {self.path} is damaged ({cause}): choose an older iteration") from cause
        counters = {"updates": meta["step"], **meta}  # earlier versions also counted critic-only steps
        return TrainState(step=meta["step"], next_rollout_id=meta["next_rollout_id"], updates=counters["updates"])

    def provide_weights(self, model: PreTrainedModel, sources: dict[str, Source], config: Config) -> None:
        """Make this checkpoint the source of a model's unread weights; raise UserError if it is of another model."""
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
        """Return sources of the weights by name, in float32; raise UserError if the checkpoint is of another model."""
        check_same_model(self.path, self._meta()["model"], describe_shapes(model_config, shapes), config, "--ref-load")
        saved = SavedTensors(self.path, MODEL)
        return {name: saved.source(name, torch.float32) for name in saved.names}

    def _meta(self) -> JsonObject:
        """Read and check the metadata."""
        try:
            meta: JsonObject = json.loads((self.path / "meta.json").read_text())
        except (OSError, ValueError) as cause:
            raise UserError(f"{self.path}/meta.json cannot be read ({cause}): the checkpoint is damaged") from cause
        if meta.get("format") not in FORMATS:
            known = " and ".join(map(str, FORMATS))
            raise UserError(f"checkpoint {self.path} has format {meta.get('format')!r}; this version reads {known}")
        return meta


def describe_model(backend: TrainBackend) -> JsonObject:
    return describe_shapes(backend.model_config, backend.parameter_shapes())


def describe_shapes(config: PretrainedConfig, shapes: Mapping[str, tuple[int, ...]]) -> JsonObject:
    return {
        "model_type": config.model_type,
        "parameters": sum(torch.Size(shape).numel() for shape in shapes.values()),
        "shapes": {name: list(shape) for name, shape in sorted(shapes.items())},
    }


def check_same_model(path: Path, saved: JsonObject, current: JsonObject, config: Config, flag: str = "--load") -> None:
    """Raise UserError if a checkpoint is of another model, or has the layout of another backend."""
    if saved == current:
        return
    if saved["shapes"].keys() != current["shapes"].keys() and all(
        saved[fact] == current[fact] for fact in ("model_type", "parameters")
    ):
        raise UserError(
            f"{flag} {path} was saved by the other --train-backend, which stores the weights of experts in other "
            "tensors: convert it to a Hugging Face folder with slime convert and give that folder"
        )
    names = sorted(set(saved["shapes"]) | set(current["shapes"]))
    name = next((n for n in names if saved["shapes"].get(n) != current["shapes"].get(n)), "model_type")
    raise UserError(
        f"{flag} {path} holds a {saved['model_type']} model of {saved['parameters']:,} parameters, but --hf-checkpoint "
        f"{config.hf_checkpoint} is a {current['model_type']} model of {current['parameters']:,} (first difference: "
        f"{name} {saved['shapes'].get(name)} and {current['shapes'].get(name)}): load one of the same model"
    )
