"""Writing and reading of this rank's parts of a checkpoint under the names of the model folder, and frozen weights.

Invariant: every written tensor has the name and the shape it has in the folder, so a checkpoint is independent of the
layout that wrote it. Of the ranks that hold the same part exactly one writes it, in turns. Parameters that the
optimizers of several ranks share are gathered on one of them, one at a time, before they are split into parts. A rank
reads only its own parameters.

Frozen sets are weights that are not trained, by name: reference, teacher, and those that engines sample with.
Invariant: a set of the policy's shape is sharded like the policy, so a copy of the policy moves nothing between ranks.
A set on the device has its own stages; sets on the host share one set of stages on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from slime.config.initial_weights import InitialWeights
from slime.errors import UserError
from slime.models.families.weight_map import ParameterEntry
from slime.models.safetensors_io import region_shape
from slime.train.backend import NamedTensor, ResidentTensors
from slime.train.backends.megatron.fp32_params import MOMENTS, MasterParam
from slime.train.backends.megatron.pipeline import StagedModel
from slime.train.backends.megatron.shard_map import ShardMap
from slime.train.backends.megatron.weights import global_buffers, global_names
from slime.train.checkpoints.rank_files import OPTIMIZER, SavedPart
from slime.train.checkpoints.reader import SavedTensors

STEP = "step"


def weight_parts(kind: str, placement: ShardMap, tensors: Iterable[NamedTensor]) -> Iterator[SavedPart]:
    """Yield the parts this rank writes of weights that are equal in all copies of the model."""
    for turn, (name, tensor) in enumerate(tensors):
        entry = placement.entries[name]
        if placement.writes_part(entry, turn):
            yield from _parts_of_shard(kind, placement, entry, tensor.detach())


def master_parts(
    kind: str, placement: ShardMap, masters: Mapping[str, MasterParam], tensors: Iterable[NamedTensor]
) -> Iterator[SavedPart]:
    """Yield the same in float32, from the master copies where weights are in another dtype; all ranks together."""
    for turn, (name, tensor) in enumerate(tensors):
        entry, master = placement.entries[name], masters.get(name)
        whole: Tensor | None = tensor.detach()
        if master is not None and tensor.dtype != torch.float32:
            whole = _gather_on_writer(placement, entry, master, master.main)
            if not master.is_shared and not placement.writes_part(entry, turn):
                continue
        elif not placement.writes_part(entry, turn):
            continue
        if whole is not None:
            yield from _parts_of_shard(kind, placement, entry, whole)


def optimizer_parts(placement: ShardMap, masters: Mapping[str, MasterParam]) -> Iterator[SavedPart]:
    """Yield `{moment}/{tensor}` and `step/{tensor}` of all updated parameters; all ranks together."""
    for turn, (name, master) in enumerate(masters.items()):
        entry, step = placement.entries[name], master.step
        if step is None or (not master.is_shared and not placement.writes_part(entry, turn)):
            continue
        for moment in MOMENTS:
            whole = _gather_on_writer(placement, entry, master, master.state[moment])
            if whole is not None:
                yield from _parts_of_shard(OPTIMIZER, placement, entry, whole, f"{moment}/")
        if whole is not None:
            yield from (
                SavedPart(OPTIMIZER, f"{STEP}/{entry.hf[share.source]}", step, (1,), (0,))
                for share in placement.own_shard(entry).shares
                if all(part.start == 0 < part.stop for part in share.region)
            )


@torch.no_grad()
def read_weights(
    saved: SavedTensors, placement: ShardMap, tensors: Iterable[NamedTensor], masters: Mapping[str, MasterParam]
) -> None:
    """Overwrite this rank's parameters and their master copies."""
    for name, tensor in tensors:
        local, master = _read_shard(saved, placement, placement.entries[name]), masters.get(name)
        tensor.copy_(local)
        own = None if master is None else master.own(placement.rank)
        if master is not None and master.main is not None and own is not None:
            master.main.copy_(local.reshape(-1)[own.begin : own.end].view(master.main.shape))


@torch.no_grad()
def read_optimizer(saved: SavedTensors, placement: ShardMap, masters: Iterable[tuple[str, MasterParam]]) -> None:
    """Restore this rank's numbers of the moments, for the parameters that have moments in the checkpoint."""
    for name, master in masters:
        entry, own = placement.entries[name], master.own(placement.rank)
        keys = [f"{part}/{one}" for part in (*MOMENTS, STEP) for one in entry.hf]
        found = [key for key in keys if key in saved]
        if not found or own is None:
            continue
        if found != keys:
            raise UserError(f"checkpoint {saved.folder} is damaged: the optimizer state of {entry.hf[0]} is incomplete")
        moments = {
            moment: _read_shard(saved, placement, entry, f"{moment}/").reshape(-1)[own.begin : own.end]
            for moment in MOMENTS
        }
        step = torch.zeros(1)
        saved.read_into(f"{STEP}/{entry.hf[0]}", step)
        master.put_state(moments, step.item())


def _parts_of_shard(
    kind: str, placement: ShardMap, entry: ParameterEntry, local: Tensor, prefix: str = ""
) -> Iterator[SavedPart]:
    shard = placement.own_shard(entry)
    for share, part in zip(shard.shares, shard.split(local), strict=True):
        if part.numel():
            name, offset = entry.hf[share.source], tuple(cut.start for cut in share.region)
            yield SavedPart(kind, prefix + name, part, placement.shapes[name], offset)


def _read_shard(saved: SavedTensors, placement: ShardMap, entry: ParameterEntry, prefix: str = "") -> Tensor:
    """Read this rank's part of a parameter, on the host and in float32."""
    shard, parts = placement.own_shard(entry), []
    for share in shard.shares:
        part = torch.empty(region_shape(share.region))
        if part.numel():
            saved.read_into(prefix + entry.hf[share.source], part, [cut.start for cut in share.region])
        parts.append(part)
    return shard.join(parts)


def _gather_on_writer(
    placement: ShardMap, entry: ParameterEntry, master: MasterParam, own: Tensor | None
) -> Tensor | None:
    """Gather the whole parameter on the rank that writes it; returns None on other ranks."""
    if entry.is_copy or own is None or (master.is_shared and placement.own_shard(entry).is_copy):
        return None
    shape, rank = master.parameter.shape, placement.rank
    if len(master.spans) == 1:
        return own.detach().view(shape)
    if rank != master.writer:
        _wait_transfers([dist.P2POp(dist.isend, own.detach().contiguous(), master.writer)])
        return None
    whole = torch.empty(master.parameter.numel(), dtype=own.dtype, device=own.device)
    transfers = []
    for span in master.spans:
        target = whole[span.begin : span.end]
        if span.rank == rank:
            target.copy_(own.detach())
        else:
            transfers.append(dist.P2POp(dist.irecv, target, span.rank))
    _wait_transfers(transfers)
    return whole.view(shape)


def _wait_transfers(transfers: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(transfers):
        work.wait()


class FrozenStages:
    """The stages of one frozen set, in the compute dtype."""

    def __init__(self, model: StagedModel) -> None:
        self.model = model
        for stage in model.stages:
            stage.requires_grad_(False)
            stage.eval()
        self.tensors: dict[str, Tensor] = {**global_names(model.stages), **global_buffers(model.stages)}
        self.average: dict[str, Tensor] = {}
        self._changes = 0

    def resident(self, name: str) -> ResidentTensors:
        """Return its tensors on the device."""
        return ResidentTensors(f"frozen {name}", [*self.tensors.values(), *self.average.values()], self._changes)

    @torch.no_grad()
    def take(self, policy: Mapping[str, Tensor], *, decay: float = 0.0) -> None:
        """Set the weights to `decay` times their value plus (1 - `decay`) times the policy's.

        With a decay the average is also kept in float32.
        """
        self._changes += 1
        if decay:
            self.start_average()
        for name, tensor in self.tensors.items():
            new = policy[name]
            tensor.copy_(self.average[name].lerp_(new.float(), 1.0 - decay) if decay else new)

    def start_average(self) -> None:
        """Create the average in float32, whose rounded values are the weights from now on."""
        if not self.average:
            self.average = {name: tensor.detach().to(torch.float32, copy=True) for name, tensor in self.tensors.items()}

    @property
    def kept(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint stores: the average if there is one, else the weights."""
        return self.average or self.tensors

    @torch.no_grad()
    def round_average(self) -> None:
        """Set the weights to the rounded average, if there is one."""
        self._changes += 1
        for name, average in self.average.items():
            self.tensors[name].copy_(average)

    @torch.no_grad()
    def load_local(self, parts: Mapping[str, Tensor]) -> None:
        self._changes += 1
        for name, part in parts.items():
            self.tensors[name].copy_(part)


class FrozenStageSets:
    """Frozen sets of weights by name, each on the device or on the host.

    `load` builds the stages of a folder with its weights, `like_policy` stages of the policy's shape with any weights.
    """

    def __init__(
        self,
        policy: Mapping[str, Tensor],
        load: Callable[[InitialWeights], StagedModel],
        like_policy: Callable[[], StagedModel],
    ) -> None:
        self._policy = policy
        self._load = load
        self._like_policy = like_policy
        self._resident: dict[str, FrozenStages] = {}
        self._on_host: dict[str, dict[str, Tensor]] = {}
        self._stage: FrozenStages | None = None
        self._staged: str | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._resident or name in self._on_host

    def resident(self) -> Iterator[ResidentTensors]:
        """Yield the tensors of the sets on the device."""
        for name, model in self._resident.items():
            yield model.resident(name)
        if self._stage is not None:
            yield self._stage.resident("stage of the host's sets")

    def load(self, name: str, source: InitialWeights) -> None:
        self._resident[name] = FrozenStages(self._load(source))

    def snapshot(self, name: str, *, decay: float, on_host: bool) -> None:
        if not on_host:
            if name not in self._resident:
                self._resident[name] = FrozenStages(self._like_policy())
                decay = 0.0
            self._resident[name].take(self._policy, decay=decay)
            return
        if self._stage is None:
            self._stage = FrozenStages(self._like_policy())
        assert decay == 0.0, "an average is kept on the device"
        self._stage.take(self._policy)
        self._on_host[name] = {key: tensor.detach().to("cpu", copy=True) for key, tensor in self._stage.tensors.items()}
        self._staged = name

    def forget(self, name: str) -> None:
        self._resident.pop(name, None)
        self._on_host.pop(name, None)
        if self._staged == name:
            self._staged = None

    def model(self, name: str) -> FrozenStages:
        """Return a set on the device, copied there first if it is on the host."""
        if name in self._resident:
            return self._resident[name]
        assert self._stage is not None
        if self._staged != name:
            self._stage.load_local(self._on_host[name])
            self._staged = name
        return self._stage
