"""A map from the tensors of a model folder to their parts and the ranks that hold them.

Invariant: all ranks compute the same map, and each part is listed once, with all ranks that hold a copy of it. Ranks
exchange only which layers their stages have, once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from slime.models.families.tp_sharding import Shard
from slime.models.families.weight_map import ParameterEntry
from slime.models.safetensors_io import Region, region_shape
from slime.train.backends.megatron.layout import Layout
from slime.train.topology import Ranks

Shapes = Mapping[str, tuple[int, ...]]
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.\w+\.\D+(\d+)$")


@dataclass(frozen=True)
class TensorPart:
    """A part of a tensor of the folder; it is item `number` of what `split` returns for a rank's parameter."""

    entry: ParameterEntry
    number: int
    region: Region
    ranks: tuple[int, ...]
    """The ranks that hold it, in order."""

    @property
    def count(self) -> int:
        return prod(region_shape(self.region))

    @property
    def place(self) -> str:
        """The offset of the part in the tensor, as text."""
        return ",".join(str(cut.start) for cut in self.region)


@dataclass(frozen=True)
class PartitionedTensor:
    """A tensor of the folder and its parts."""

    name: str
    shape: tuple[int, ...]
    parts: list[TensorPart] = field(default_factory=list)


class ShardMap:
    """The parts of one model's tensors on the ranks of a layout."""

    def __init__(
        self, layout: Layout, world: Ranks, entries: Iterable[ParameterEntry], shapes: Shapes, own: Iterable[str]
    ) -> None:
        """`own` are the global names of this rank's parameters; all ranks call it together."""
        self.layout = layout
        self.rank = world.rank
        self.shapes = dict(shapes)
        self.entries = {entry.megatron: entry for entry in entries}
        stage = self.stage_of(world.rank)
        found = world.union({f"{stage} {_stage_key(name)}" for name in own})
        self._stages: dict[str, int] = {}
        for one in found:
            number, _, kind = one.partition(" ")
            self._stages[kind] = min(int(number), self._stages.get(kind, int(number)))
        experts = [int(match[1]) for name in self.entries if (match := _EXPERT.search(name))]
        self._experts = max(experts, default=-1) + 1
        self._tensors: list[PartitionedTensor] | None = None

    @property
    def tensors(self) -> list[PartitionedTensor]:
        """All tensors of the folder, in the order of the rules."""
        if self._tensors is None:
            found: dict[str, PartitionedTensor] = {}
            for entry in self.entries.values():
                if not entry.is_copy:
                    for part in self._parts(entry):
                        name = entry.hf[part[0]]
                        found.setdefault(name, PartitionedTensor(name, self.shapes[name])).parts.append(part[1])
            self._tensors = list(found.values())
        return self._tensors

    def own_shard(self, entry: ParameterEntry) -> Shard:
        """Return this rank's shard of a parameter of its stages."""
        size = self._cut(entry)
        return self._shard(entry, self.rank % size, size)

    def writes_part(self, entry: ParameterEntry, turn: int) -> bool:
        """Return whether this rank writes its part of a parameter, of which other ranks may hold copies."""
        if entry.is_copy or self.own_shard(entry).is_copy:
            return False
        copies = self.layout.expert_data if entry.is_expert else self.layout.data * self.layout.context
        return self.copy_of(entry) == turn % copies

    def copy_of(self, entry: ParameterEntry) -> int:
        """Return the index of this rank's copy of a parameter."""
        layout = self.layout
        if entry.is_expert:
            return self.rank // (layout.expert_tensor * layout.expert) % layout.expert_data
        return self.rank // layout.tensor % (layout.data * layout.context)

    def stage_of(self, rank: int) -> int:
        return rank // (self.layout.world // self.layout.pipeline)

    def _parts(self, entry: ParameterEntry) -> Iterator[tuple[int, TensorPart]]:
        """Yield (index of the tensor, part) of the tensors that form a parameter."""
        size = self._cut(entry)
        everywhere: list[int] = []
        shards = [self._shard(entry, number, size) for number in range(size)]
        for number, shard in enumerate(shards):
            if shard.is_copy:
                everywhere += self._holders(entry, number)
        for number, shard in enumerate(shards):
            if shard.is_copy:
                continue
            ranks = tuple(sorted([*self._holders(entry, number), *(everywhere if number == 0 else ())]))
            for index, share in enumerate(shard.shares):
                if prod(region_shape(share.region)) or not prod(self.shapes[entry.hf[share.source]]):
                    yield share.source, TensorPart(entry, index, share.region, ranks)

    def _shard(self, entry: ParameterEntry, number: int, size: int) -> Shard:
        return entry.form.shard([self.shapes[name] for name in entry.hf], number, size)

    def _cut(self, entry: ParameterEntry) -> int:
        """Return the number of ranks that share the matrices of a parameter."""
        return self.layout.expert_tensor if entry.is_expert else self.layout.tensor

    def _holders(self, entry: ParameterEntry, number: int) -> list[int]:
        """Return the ranks that hold part `number` of a parameter."""
        layout, each = self.layout, self.layout.world // self.layout.pipeline
        begin = self._stages[_stage_key(entry.megatron)] * each
        if not entry.is_expert:
            return list(range(begin + number, begin + each, layout.tensor))
        match = _EXPERT.search(entry.megatron)
        assert match is not None
        first = int(match[1]) // (self._experts // layout.expert) * layout.expert_tensor + number
        return list(range(begin + first, begin + each, layout.expert_tensor * layout.expert))


def _stage_key(name: str) -> str:
    """Return what determines the stage of a parameter: its layer, or its own name if it is in no layer."""
    layer = _LAYER.match(name)
    return name if layer is None else layer[1]
