"""Losses other than the policy's: supervised, value, and the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slime.algorithms.policy_loss import clipped_value_loss
from slime.algorithms.reduce import weighted_sum
from slime.config import Config
from slime.config.plugins import load_function
from slime.config.plugins.view import plugin_args
from slime.errors import UserError
from slime.train.samples.micro_batch import MicroBatch
from slime.train.samples.plugin_batch import batch_for_plugins
from slime.train.samples.rollout_data import RolloutData

Metrics = dict[str, Tensor]
LOSS_PARAMS = ("args", "batch", "logits", "sum_of_sample_mean")


def supervised_loss(micro: MicroBatch, log_probs: Tensor) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood of the unmasked response tokens."""
    loss = weighted_sum(-log_probs, micro.weights)
    return loss, {"loss": loss.detach()}


def value_loss(micro: MicroBatch, values: Tensor, *, value_clip: float) -> tuple[Tensor, Metrics]:
    """Squared distance of the values to the returns, clipped around the old values."""
    token_loss, was_clipped = clipped_value_loss(
        values, micro.columns["values"], micro.columns["returns"], value_clip=value_clip
    )
    loss = weighted_sum(token_loss, micro.weights)
    return loss, {
        "loss": loss.detach(),
        "value_loss": loss.detach(),
        "value_clipfrac": weighted_sum(was_clipped, micro.weights),
    }


class CustomObjective:
    """`f(args, batch, logits, sum_of_sample_mean)`; its loss has the scale of `sum_of_sample_mean`."""

    def __init__(self, config: Config) -> None:
        path = config.custom_loss_function_path
        assert path is not None, "checked when the flags were"
        self._path = path
        self._config = config
        self._function: Callable[..., Any] = load_function(path, what="--custom-loss-function-path", params=LOSS_PARAMS)

    def __call__(self, data: RolloutData, micro: MicroBatch, logits: Tensor) -> tuple[Tensor, Metrics]:
        """A row without samples contributes nothing, but is in the graph, so that ranks stay in step."""
        if not micro.positions:
            return logits.sum() * 0.0, {}

        def sum_of_sample_mean(values: Tensor) -> Tensor:
            return weighted_sum(values, micro.weights) / micro.scale

        given = plugin_args(self._config), batch_for_plugins(data, micro), logits, sum_of_sample_mean
        if self._config.recompute_loss_function:
            loss, metrics = checkpoint(self._function, *given, use_reentrant=False)
        else:
            loss, metrics = self._function(*given)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not isinstance(metrics, Mapping):
            raise UserError(f"{self._path} must return (scalar loss tensor, dict of metrics)")
        scaled = {name: torch.as_tensor(value).detach().to(loss) * micro.scale for name, value in metrics.items()}
        loss = loss * micro.scale
        return loss, {"loss": loss.detach(), **scaled}
