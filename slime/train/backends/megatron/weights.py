"""Model folders, and their weights in the stages of this process.

Invariant: a rank reads what it has, region by region, and nothing else; what a parameter is made of is for the family's
rules to say. Every parameter and every router's bias of the stages is overwritten, or the folder is refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from slime.errors import UserError
from slime.models.families.family import Family, Fields, family_of
from slime.models.families.model_folder import FamilyFolder, open_family_folder
from slime.models.families.tp_sharding import Shard
from slime.models.families.weight_map import Entry
from slime.models.folder import read_text_config
from slime.models.loading import config_of_weights
from slime.models.tensor_sources import Source, read_onto
from slime.train.backends.megatron.fp32_params import Master
from slime.train.backends.megatron.process_groups import Groups
from slime.train.timers import Progress

# Global names of parameters: those that the whole model has, however it is cut.
#
# Invariant: a parameter has the same name in every layout. Layers are numbered over all stages and experts over all
# expert-parallel ranks, from 0.

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)$")
Named = TypeVar("Named", bound=Tensor)


def global_names(stages: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Every parameter of this process's stages."""
    return {
        name: parameter
        for stage in map(unwrapped, stages)
        for name, parameter in _globally(stage, stage.named_parameters())
    }


def global_buffers(stages: Sequence[nn.Module]) -> dict[str, Tensor]:
    """What belongs to the weights and is not trained: the biases that routers choose experts with."""
    return {
        name: buffer
        for stage in map(unwrapped, stages)
        for name, buffer in _globally(stage, stage.named_buffers())
        if name.endswith(".mlp.router.expert_bias")
    }


def unwrapped(stage: nn.Module) -> nn.Module:
    """The model inside what adds up its gradients or converts its inputs."""
    while isinstance(inner := stage._modules.get("module"), nn.Module):
        stage = inner
    return stage


def _globally(stage: nn.Module, named: Iterator[tuple[str, Named]]) -> Iterator[tuple[str, Named]]:
    for name, value in named:
        found = _LAYER.match(name)
        if found is None:
            yield name, value
            continue
        layer: Any = stage.get_submodule(f"decoder.layers.{found[1]}")
        own = f"decoder.layers.{layer.layer_number - 1}.{name[found.end() :]}"
        if (expert := _EXPERT.search(own)) is not None:
            number = layer.mlp.local_expert_indices[int(expert[2])]
            own = f"{own[: expert.start()]}{expert[1]}{number}"
        yield own, value


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelFolder:
    """A Hugging Face folder as Megatron's side sees it; `vocab_multiple` is --make-vocab-size-divisible-by."""

    path: Path
    config: PretrainedConfig
    opened: FamilyFolder
    vocab_multiple: int
    instead: Callable[[ModelFolder], Mapping[str, Source]] | None = None
    """Gives what is read in the place of the folder's own tensors: those of a checkpoint."""

    @classmethod
    def read(
        cls,
        path: Path,
        *,
        vocab_multiple: int,
        trust_remote_code: bool = False,
        instead: Callable[[ModelFolder], Mapping[str, Source]] | None = None,
    ) -> ModelFolder:
        family = family_of(read_text_config(path))
        if family.support.megatron is not None:
            raise UserError(f"{path} cannot be trained by Megatron: {family.support.megatron}")
        config = config_of_weights(path, trust_remote_code=trust_remote_code)
        return cls(path, config, open_family_folder(path, vocab_divisor=vocab_multiple), vocab_multiple, instead)

    @property
    def family(self) -> Family:
        return self.opened.family

    @cached_property
    def fields(self) -> Fields:
        return self.opened.fields

    @cached_property
    def sources(self) -> dict[str, Source]:
        """The tensors of the folder; nothing is read yet."""
        own = self.opened.sources
        return own if self.instead is None else {**own, **self.instead(self)}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors that parameters are made of."""
        names = (name for entry in self.entries.values() if not entry.is_copy for name in entry.hf)
        return {name: self.opened.sources[name].shape for name in names}

    @property
    def entries(self) -> dict[str, Entry]:
        """What each of Megatron's parameters is made of, in the names of the folder."""
        return self.opened.entries

    def shard(self, entry: Entry, groups: Groups) -> Shard:
        """What this rank has of a parameter."""
        ranks = groups.expert_tensor if entry.is_expert else groups.tensor
        return entry.form.shard([self.sources[name].shape for name in entry.hf], ranks.rank, ranks.size)


@torch.no_grad()
def read_weights(
    stages: Sequence[nn.Module],
    folder: ModelFolder,
    groups: Groups,
    progress: Progress,
    *,
    without: Collection[str] = (),
) -> None:
    """Overwrite all that the stages have, but those parameters that the folder has nothing of."""
    if groups.topology.world.rank == 0:
        for sentence in folder.opened.left_alone_in_words():
            logger.info(sentence)
    named: dict[str, Tensor] = {**global_names(stages), **global_buffers(stages)}
    targets = {name: tensor for name, tensor in named.items() if name not in without}
    for name, target in progress.over(targets.items(), "reading weights: tensor", len(targets)):
        entry = folder.entries.get(name)
        if entry is None:
            raise UserError(
                f"{folder.family.name} says nothing of Megatron's parameter {name}: {folder.path} is not read"
            )
        shard = folder.shard(entry, groups)
        if tuple(target.shape) != tuple(shard.shape):
            raise UserError(
                f"{name} is {tuple(target.shape)} by config.json of {folder.path} and {tuple(shard.shape)} by its "
                "weights: copy or download the folder again"
            )
        target.copy_(shard.join(list(_parts(folder, entry, shard, target.device))))


@torch.no_grad()
def read_masters(
    masters: Mapping[str, Master], folder: ModelFolder, groups: Groups, *, without: Collection[str] = ()
) -> None:
    """Give the optimizer's float32 copies the bits that parameters in a narrower dtype have lost in `read_weights`."""
    for name, master in masters.items():
        own, entry = master.own(groups.topology.world.rank), folder.entries.get(name)
        if name in without or entry is None or own is None or master.main is None:
            continue
        if any(folder.sources[hf].dtype.itemsize > master.parameter.dtype.itemsize for hf in entry.hf):
            shard = folder.shard(entry, groups)
            whole = shard.join([part.float() for part in _parts(folder, entry, shard, master.main.device)])
            master.main.copy_(whole.reshape(-1)[own.begin : own.end].view(master.main.shape))


def _parts(folder: ModelFolder, entry: Entry, shard: Shard, device: torch.device) -> Iterator[Tensor]:
    for share in shard.shares:
        yield read_onto(folder.sources[entry.hf[share.source]], share.region, device)
