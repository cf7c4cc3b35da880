"""Routing replay: makes the routers of a transformers model repeat which experts tokens went to.

Invariant: a router's weights for given experts are those that it would compute had it chosen them itself, so its
gradient is that of its own logits, and replaying its own choice changes no number. The routing of a row stays in place
until the next row begins: layers that are recomputed in the backward repeat the operations of the forward.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slime.errors import UserError
from slime.train.samples.micro_batch import Routing

Scoring = Callable[[Any, Tensor, Tensor], Tensor]
"""Function of (router, logits [t, experts], chosen [t, k]) that returns the weights of the chosen experts, [t, k]."""

_ROUTER = re.compile(r"Top[Kk]Router$")
_LAYER = re.compile(r"\blayers\.(\d+)\.")


class RouterReplayHooks:
    """Forward hooks on all routers of a model; `begin` sets the routing of the next pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._scoring = SCORINGS.get(model.config.get_text_config().model_type)
        self._routing: Routing | None = None
        self._chosen: dict[int, Tensor] = {}
        self._is_checked = False
        self.layers: list[int] = []
        for name, module in model.named_modules():
            place = _LAYER.search(name)
            if place is not None and _ROUTER.search(type(module).__name__):
                self.layers.append(int(place[1]))
                module.register_forward_hook(partial(self._route, int(place[1])))

    def check(self) -> None:
        """Raise UserError if routing cannot be replayed with this model's routers."""
        if not self.layers or self._scoring is None:
            known = ", ".join(sorted(SCORINGS))
            raise UserError(
                f"--use-routing-replay does not support the routers of {type(self._model).__name__}: drop it, or train "
                f"a model of one of the families {known}"
            )

    def begin(self, routing: Routing | None, own: slice, device: torch.device) -> None:
        """Start a row: routers follow its routing, if any; `own` are this rank's tokens of the row."""
        self._routing, self._chosen = routing, {}
        if routing is None:
            return
        if routing.given is not None:
            part = routing.given[own].to(device)
            self._chosen = {layer: part[:, layer].long() for layer in self.layers}
        else:
            self._chosen = {layer: experts.to(device).long() for layer, experts in routing.recorded.items()}

    def keep(self) -> None:
        """Finish a row's forward: record the routers' choices on the host as its routing, unless it has one."""
        routing = self._routing
        if routing is not None and routing.given is None and not routing.recorded:
            routing.recorded = {layer: experts.to(torch.int16).cpu() for layer, experts in self._chosen.items()}

    @torch.compiler.disable
    def _route(
        self, layer: int, router: nn.Module, _inputs: object, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Forward hook: replaces the router's (logits, weights, experts) by those of the given experts, if any."""
        if self._routing is None:
            return None
        assert self._scoring is not None, "checked when the model was loaded"
        logits, own_weights, own = output
        if not self._is_checked:  # the formula must give the weights that the router itself computes
            with torch.no_grad():
                found = self._scoring(router, logits, own).to(own_weights.dtype)
                if found.shape != own_weights.shape or not torch.allclose(found, own_weights, rtol=1e-2, atol=1e-4):
                    raise UserError(
                        f"--use-routing-replay: {type(router).__name__} of this version of transformers weighs its "
                        "experts by an unknown formula: drop the flag"
                    )
            self._is_checked = True
        if layer in self._chosen:
            given = self._chosen[layer]
            if torch.is_grad_enabled():
                self._routing.count(own, given)
            chosen = torch.where(given >= 0, given, own)
        else:
            chosen = self._chosen[layer] = own
        return logits, self._scoring(router, logits, chosen).to(own_weights.dtype), chosen


def _softmax(router: Any, logits: Tensor, chosen: Tensor, *, normalised: bool | None = None) -> Tensor:
    """Softmax over all experts; normalised to a sum of 1 if `normalised`, by default as the router is configured."""
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(1, chosen)
    if router.norm_topk_prob if normalised is None else normalised:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights


def _sigmoid(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    """Scaled sigmoid; normalised to a sum of 1 as the router is configured."""
    weights = logits.sigmoid().gather(1, chosen)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * router.routed_scaling_factor


def _sigmoid_of_float(_router: object, logits: Tensor, chosen: Tensor) -> Tensor:
    """Sigmoid in float32, normalised to a sum of 1."""
    weights = logits.float().sigmoid().gather(1, chosen)
    return weights / weights.sum(dim=-1, keepdim=True)


def _softmax_of_chosen(_router: object, logits: Tensor, chosen: Tensor) -> Tensor:
    """Softmax over the chosen experts alone."""
    return torch.softmax(logits.gather(1, chosen), dim=1, dtype=logits.dtype)


_always_normalised: Scoring = partial(_softmax, normalised=True)

SCORINGS: dict[str, Scoring] = {
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe"), _softmax),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text", "mixtral"), _always_normalised),
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "mimo_v2_flash"), _sigmoid),
    "minimax_m2": _sigmoid_of_float,
    "gpt_oss": _softmax_of_chosen,
}
"""Formula of a family's routers for the weights of the chosen experts."""
