"""Replay of expert routing in Megatron's routers.

Invariant: a router uses the routing of the row that it computes. In a forward this is the row begun last. When a layer
is recomputed, it is the first row of the stage whose backward is still pending, since every stage runs its backwards in
the order of its forwards. Choices are replaced at Megatron's own extension point (`TopKRouter.router_replay`), without
the list of all routers of a process that Megatron's class keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from slime.errors import UserError
from slime.train.backends.megatron.cp_rows import RowSlices
from slime.train.backends.megatron.process_groups import MegatronGroups
from slime.train.samples.micro_batch import UNKNOWN, Routing

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

TopK = Callable[..., tuple[Tensor, Tensor]]


class MegatronRoutingReplay:
    """Replays routing in the routers of this rank's stages of one model."""

    def __init__(self, stages: Sequence[GPTModel], groups: MegatronGroups) -> None:
        self._groups = groups
        self._stages = [_StageRouting() for _ in stages]
        for stage, routing in zip(stages, self._stages, strict=True):
            for module in stage.modules():
                if isinstance(module, TopKRouter):
                    check_routers(module.config)
                    module.router_replay = _LayerReplay(module.layer_number - 1, routing)

    def forget(self) -> None:
        """Stop the replay, before and after passes over micro-batches: routers choose themselves."""
        for stage in self._stages:
            stage.rows, stage.repeated = [], {}

    def begin(self, stage: int, routing: Routing | None, slices: RowSlices, *, counts: bool) -> None:
        """Prepare the forward of a row through one stage; without a routing its routers choose themselves.

        With `counts` the pass counts the replayed choices that differ from the routers' own.
        """
        if routing is None:
            self._stages[stage].rows.append(None)
            return
        given = routing.given  # from here on of the tokens that this rank's routers see
        if given is not None and slices.source is not None:
            padding = given.new_full((1, *given.shape[1:]), UNKNOWN)
            given = torch.cat([given, padding]).index_select(0, torch.from_numpy(slices.source))
        if given is not None and self._groups.layout.sequence_parallel:
            given = given.chunk(self._groups.tensor.size)[self._groups.tensor.rank]
        self._stages[stage].rows.append(_RowRouting(routing, given, counts))

    def keep(self, stage: int) -> None:
        """End the forward: choices that its routers recorded are copied to the host."""
        row = self._stages[stage].rows[-1]
        if row is not None:
            row.routing.recorded |= {layer: experts.cpu() for layer, experts in row.new.items()}
            row.new = {}


@dataclass
class _RowRouting:
    """The routing of a row in one stage: the choices to replay, and `new` ones of its routers, by layer."""

    routing: Routing
    given: Tensor | None
    counts: bool
    new: dict[int, Tensor] = field(default_factory=dict)

    def experts(self, layer: int, device: torch.device) -> Tensor | None:
        """Return the experts [t, k] of a layer to replay, or None if there are none yet."""
        if self.given is not None:
            return self.given[:, layer].to(device).long()
        found = self.new.get(layer, self.routing.recorded.get(layer))
        return None if found is None else found.to(device).long()


@dataclass
class _StageRouting:
    """The rows of a stage's forwards, in order, and the number of recomputations in backward by layer."""

    rows: list[_RowRouting | None] = field(default_factory=list)
    repeated: dict[int, int] = field(default_factory=dict)

    def row(self, layer: int, *, in_backward: bool) -> _RowRouting | None:
        """Return the row that a layer computes now; in backward it recomputes the rows in order."""
        if not self.rows:
            return None
        if not in_backward:
            return self.rows[-1]
        number = self.repeated.get(layer, 0)
        self.repeated[layer] = number + 1
        return self.rows[number]


class _LayerReplay:
    """Replaces Megatron's `RouterReplay`; `topk_routing_with_score_function` calls it."""

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
        """Return (scores, experts) of the chosen experts; Megatron computes their weights from these."""
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        in_backward = torch._C._current_graph_task_id() != -1
        row = self._stage.row(self._layer, in_backward=in_backward)
        if row is None:
            return values, own
        given = row.experts(self._layer, scores.device)
        if given is None:
            row.new[self._layer] = own.to(torch.int16)
            return values, own
        if row.counts and not in_backward:
            row.routing.count(own, given)
        chosen = torch.where(given >= 0, given, own)
        return scores.gather(1, chosen), chosen


def check_routers(config: TransformerConfig) -> None:
    """Raise UserError for routers whose choices cannot be replaced."""
    if config.moe_router_fusion:
        raise UserError(
            "--use-routing-replay replaces the choices of routers, which --moe-router-fusion hides: drop one flag"
        )
    if "sinkhorn" in config.moe_router_load_balancing_type:
        raise UserError(
            "--use-routing-replay replays choices by the routers' scores, and --moe-router-load-balancing-type "
            "sinkhorn chooses by other means: drop one flag"
        )
