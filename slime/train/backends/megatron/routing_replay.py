"""Megatron's routers, made to repeat which experts tokens went to.

Invariant: a router follows the routing of the row that it computes. In a forward that is the row begun last; in a layer
that is computed once more it is the first one of its stage whose backward is still to come, since every stage has its
backwards in the order of its forwards. What stands in the place of a router's choice is Megatron's own seam for it
(`TopKRouter.router_replay`), without the list of all routers of a process that its class keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from slime.errors import UserError
from slime.train.backends.megatron.cp_rows import RowSlices
from slime.train.backends.megatron.process_groups import Groups
from slime.train.samples.micro_batch import UNKNOWN, Routing

TopK = Callable[..., tuple[Tensor, Tensor]]


class Routers:
    """Those of this rank's stages of one model."""

    def __init__(self, stages: Sequence[Any], groups: Groups) -> None:
        self._groups = groups
        self._stages = [_StageRouting() for _ in stages]
        for stage, routing in zip(stages, self._stages, strict=True):
            for module in stage.modules():
                if isinstance(module, TopKRouter):
                    check_routers(module.config)
                    module.router_replay = _Repeat(module.layer_number - 1, routing)

    def forget(self) -> None:
        """Before and after passes over micro-batches: routers follow nobody."""
        for stage in self._stages:
            stage.forget()

    def begin(self, stage: int, routing: Routing | None, slices: RowSlices, *, counts: bool) -> None:
        """The forward of a row through one stage is next; without a routing routers choose. Choices that they would not
        have made are counted in some passes."""
        row = None if routing is None else _Row(routing, self._own_rows(routing, slices), counts=counts)
        self._stages[stage].begin(row)

    def keep(self, stage: int) -> None:
        """It is over: what its routers chose first is on the host."""
        self._stages[stage].keep()

    def _own_rows(self, routing: Routing, slices: RowSlices) -> Tensor | None:
        """What is given of the tokens that this rank's routers see: its slices, and of these its part in the tensor
        group under sequence parallelism."""
        if routing.given is None:
            return None
        rows = routing.given
        if slices.source is not None:
            padding = rows.new_full((1, *rows.shape[1:]), UNKNOWN)
            rows = torch.cat([rows, padding]).index_select(0, torch.from_numpy(slices.source))
        if not self._groups.layout.sequence_parallel:
            return rows
        return rows.chunk(self._groups.tensor.size)[self._groups.tensor.rank]


class _Row:
    """A row in one stage: what its routers do, and what they chose if they did so first."""

    def __init__(self, routing: Routing, given: Tensor | None, *, counts: bool) -> None:
        self.routing = routing
        self.counts = counts
        self._given = given
        self._new: dict[int, Tensor] = {}

    def experts(self, layer: int, device: torch.device) -> Tensor | None:
        """[t, k] of a layer; None where nothing was decided yet."""
        if self._given is not None:
            return self._given[:, layer].to(device).long()
        found = self._new.get(layer, self.routing.recorded.get(layer))
        return None if found is None else found.to(device).long()

    def record(self, layer: int, experts: Tensor) -> None:
        self._new[layer] = experts.to(torch.int16)

    def keep(self) -> None:
        self.routing.recorded |= {layer: experts.cpu() for layer, experts in self._new.items()}
        self._new = {}


class _StageRouting:
    """The rows that went through a stage, in their order."""

    def __init__(self) -> None:
        self._rows: list[_Row | None] = []
        self._repeated: dict[int, int] = {}  # backwards of each layer that is computed once more

    def forget(self) -> None:
        self._rows, self._repeated = [], {}

    def begin(self, row: _Row | None) -> None:
        self._rows.append(row)

    def keep(self) -> None:
        if self._rows[-1] is not None:
            self._rows[-1].keep()

    def row(self, layer: int, *, in_backward: bool) -> _Row | None:
        if not self._rows:
            return None
        if not in_backward:
            return self._rows[-1]
        number = self._repeated.get(layer, 0)
        self._repeated[layer] = number + 1
        return self._rows[number]


class _Repeat:
    """In the place of `RouterReplay`: what it is asked stands in `topk_routing_with_score_function`."""

    def __init__(self, layer: int, stage: _StageRouting) -> None:
        self._layer = layer
        self._stage = stage

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: TopK,
    ) -> tuple[Tensor, Tensor]:
        """(scores, experts) of the chosen ones; their weights are computed from these as ever."""
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        in_backward = torch._C._current_graph_task_id() != -1
        row = self._stage.row(self._layer, in_backward=in_backward)
        if row is None:
            return values, own
        given = row.experts(self._layer, scores.device)
        if given is None:
            row.record(self._layer, own)
            return values, own
        if row.counts and not in_backward:
            row.routing.count(own, given)
        chosen = torch.where(given >= 0, given, own)
        return scores.gather(1, chosen), chosen


def check_routers(config: Any) -> None:
    """Refuse routers that choose where nobody can tell them."""
    if config.moe_router_fusion:
        raise UserError("--use-routing-replay tells routers what to choose, which --moe-router-fusion hides: keep one")
    if "sinkhorn" in config.moe_router_load_balancing_type:
        raise UserError(
            "--use-routing-replay repeats what routers chose by their scores, and --moe-router-load-balancing-type "
            "sinkhorn chooses by other means: keep one"
        )
