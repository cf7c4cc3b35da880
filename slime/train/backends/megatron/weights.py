"""Reading of model folders into the stages of this process, and global parameter names.

Invariant: a rank reads only the regions that it holds. The family's rules define which tensors form a parameter. Every
parameter and every router bias of the stages is overwritten, or UserError is raised.

Invariant: a parameter has the same global name in every layout. Layers are numbered over all stages and experts over
all expert-parallel ranks, from 0.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from slime.errors import UserError
from slime.models.families.family import Family, Fields, family_of
from slime.models.families.model_folder import FamilyFolder, open_family_folder
from slime.models.families.tp_sharding import Shard
from slime.models.families.weight_map import ParameterEntry
from slime.models.folder import read_text_config
from slime.models.loading import load_weights_config
from slime.models.tensor_sources import Source, read_to_device
from slime.train.backends.megatron.process_groups import MegatronGroups
from slime.train.backends.megatron.state import MasterParam
from slime.train.timers import RankProgress

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_layer import TransformerLayer

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)$")
Named = TypeVar("Named", bound=Tensor)


def global_names(stages: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Return every parameter of this process's stages by global name."""
    return {
        name: parameter
        for stage in map(unwrap_stage, stages)
        for name, parameter in _with_global_names(stage, stage.named_parameters())
    }


def global_buffers(stages: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the buffers that belong to the weights, by global name: the biases with which routers choose experts."""
    return {
        name: buffer
        for stage in map(unwrap_stage, stages)
        for name, buffer in _with_global_names(stage, stage.named_buffers())
        if name.endswith(".mlp.router.expert_bias")
    }


def unwrap_stage(stage: nn.Module) -> nn.Module:
    """Return the model inside Megatron's wrappers, which reduce gradients or convert inputs."""
    while isinstance(inner := stage._modules.get("module"), nn.Module):
        stage = inner
    return stage


def _with_global_names(stage: nn.Module, named: Iterator[tuple[str, Named]]) -> Iterator[tuple[str, Named]]:
    """Replace the names of one stage's tensors by global names."""
    for name, value in named:
        found = _LAYER.match(name)
        if found is None:
            yield name, value
            continue
        layer: TransformerLayer = stage.get_submodule(f"decoder.layers.{found[1]}")
        own = f"decoder.layers.{layer.layer_number - 1}.{name[found.end() :]}"
        if (expert := _EXPERT.search(own)) is not None:
            number = layer.mlp.local_expert_indices[int(expert[2])]
            own = f"{own[: expert.start()]}{expert[1]}{number}"
        yield own, value


@dataclass(frozen=True)
class ModelFolder:
    """A Hugging Face folder that Megatron reads; `vocab_multiple` is --make-vocab-size-divisible-by."""

    path: Path
    config: PretrainedConfig
    opened: FamilyFolder
    vocab_multiple: int
    instead: Callable[[ModelFolder], Mapping[str, Source]] | None = None
    """Returns tensors that replace the folder's own, such as those of a checkpoint."""

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
        config = load_weights_config(path, trust_remote_code=trust_remote_code)
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
        """The shapes of the tensors that parameters are made of."""
        names = (name for entry in self.entries.values() if not entry.is_copy for name in entry.hf)
        return {name: self.opened.sources[name].shape for name in names}

    @property
    def entries(self) -> dict[str, ParameterEntry]:
        """The tensors of the folder that form each parameter, by Megatron's global name."""
        return self.opened.entries

    def shard(self, entry: ParameterEntry, groups: MegatronGroups) -> Shard:
        """Return this rank's shard of a parameter."""
        ranks = groups.expert_tensor if entry.is_expert else groups.tensor
        return entry.form.shard([self.sources[name].shape for name in entry.hf], ranks.rank, ranks.size)


@torch.no_grad()
def read_weights(
    stages: Sequence[nn.Module],
    folder: ModelFolder,
    groups: MegatronGroups,
    progress: RankProgress,
    *,
    without: Collection[str] = (),
) -> None:
    """Read all parameters and router biases of the stages, except those named in `without`."""
    if groups.topology.world.rank == 0:
        for sentence in folder.opened.unused_tensor_notes():
            logger.info(sentence)
    named: dict[str, Tensor] = {**global_names(stages), **global_buffers(stages)}
    targets = {name: tensor for name, tensor in named.items() if name not in without}
    for name, target in progress.over(targets.items(), "reading weights: tensor", len(targets)):
        entry = folder.entries.get(name)
        if entry is None:
            raise UserError(
                f"cannot read {folder.path}: the family {folder.family.name} has no rule for Megatron's parameter "
                f"{name}"
            )
        shard = folder.shard(entry, groups)
        if tuple(target.shape) != tuple(shard.shape):
            raise UserError(
                f"{name} has shape {tuple(target.shape)} by config.json of {folder.path}, but {tuple(shard.shape)} by "
                "its weights: copy or download the folder again"
            )
        target.copy_(shard.join(list(_read_shares(folder, entry, shard, target.device))))


@torch.no_grad()
def read_masters(
    masters: Mapping[str, MasterParam], folder: ModelFolder, groups: MegatronGroups, *, without: Collection[str] = ()
) -> None:
    """Fill the float32 master copies from the folder if the parameters' dtype is narrower than the folder's."""
    for name, master in masters.items():
        own, entry = master.own(groups.topology.world.rank), folder.entries.get(name)
        if name in without or entry is None or own is None or master.main is None:
            continue
        if any(folder.sources[hf].dtype.itemsize > master.parameter.dtype.itemsize for hf in entry.hf):
            shard = folder.shard(entry, groups)
            whole = shard.join([part.float() for part in _read_shares(folder, entry, shard, master.main.device)])
            master.main.copy_(whole.reshape(-1)[own.begin : own.end].view(master.main.shape))


def _read_shares(folder: ModelFolder, entry: ParameterEntry, shard: Shard, device: torch.device) -> Iterator[Tensor]:
    """Read the regions that form a shard."""
    for share in shard.shares:
        yield read_to_device(folder.sources[entry.hf[share.source]], share.region, device)
