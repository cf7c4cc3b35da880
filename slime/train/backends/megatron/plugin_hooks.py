"""Calls of the user's functions inside Megatron, with upstream slime's arguments.

`args` is the namespace that all plugins get, `model` the list of this process's stages, `optimizer` Megatron's
optimizer. Instead of upstream's scheduler, hooks get the rates of the step: `learning_rate` and `weight_decay`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megatron.core.models.gpt.gpt_model import GPTModel

from slime.config import Config
from slime.config.plugins import load_plugin
from slime.config.plugins.view import plugin_args
from slime.errors import UserError
from slime.train.backend import Rates

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import MegatronOptimizer
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch import nn

Hook = Callable[..., object]

_LOG_PROB_PREFIXES = {"ref": "ref_", "teacher": "teacher_"}
"""Upstream's name prefixes for log-probs, by frozen set; snapshots of the policy have none."""


class MegatronHooks:
    """The user's hooks, loaded once; a hook that is not set does nothing."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._init = _load_hook(config.custom_megatron_init_path, "--custom-megatron-init-path")
        self._before_log_probs = _load_hook(
            config.custom_megatron_before_log_prob_hook_path, "--custom-megatron-before-log-prob-hook-path"
        )
        self._before_step = _load_hook(
            config.custom_megatron_before_train_step_hook_path, "--custom-megatron-before-train-step-hook-path"
        )
        self._provider = _load_hook(config.custom_model_provider_path, "--custom-model-provider-path")

    def after_init(self) -> None:
        """Call the init hook, after the process groups exist."""
        if self._init is not None:
            self._init(plugin_args(self._config))

    def before_log_probs(self, model: Sequence[nn.Module], weights: str) -> None:
        if self._before_log_probs is not None:
            self._before_log_probs(plugin_args(self._config), list(model), _LOG_PROB_PREFIXES.get(weights, ""))

    def before_step(
        self, rollout_id: int, step_id: int, model: Sequence[nn.Module], optimizer: MegatronOptimizer, rates: Rates
    ) -> None:
        if self._before_step is not None:
            self._before_step(plugin_args(self._config), rollout_id, step_id, list(model), optimizer, rates)

    def stage(
        self,
        settings: TransformerConfig,
        first: bool,
        last: bool,
        vp_stage: int | None,
        default: Callable[[], GPTModel],
    ) -> GPTModel:
        """Build a stage of a model with the user's provider, or with `default` if there is none."""
        if self._provider is None:
            return default()
        offered = {
            "vp_stage": vp_stage,
            "config": settings,
            "args": plugin_args(self._config),
            "default": default,
        }
        takes = inspect.signature(self._provider).parameters
        made = self._provider(first, last, **{name: value for name, value in offered.items() if name in takes})
        if not isinstance(made, GPTModel):
            raise UserError(
                f"--custom-model-provider-path {self._config.custom_model_provider_path} returned a "
                f"{type(made).__name__}: a GPTModel of megatron.core is needed"
            )
        return made


def _load_hook(path: str | None, flag: str) -> Hook | None:
    return None if path is None else load_plugin(path, flag)
