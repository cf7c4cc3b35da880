"""The user's functions that are called inside Megatron, with what upstream slime calls them with.

`args` is the namespace that all plugins see. `model` is the list of this process's stages, `optimizer` Megatron's. In
the place of upstream's scheduler comes what the step is made with: `learning_rate` and `weight_decay`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel

from slime.config import Config
from slime.config.plugins import load_plugin
from slime.config.plugins.view import plugin_args
from slime.errors import UserError
from slime.train.lr_schedule import Rates

Hook = Callable[..., Any]

_PREFIXES = {"ref": "ref_", "teacher": "teacher_"}
"""Of the sets of weights that are no state of the policy: what upstream puts before the names of their log-probs."""


class Hooks:
    """Found once; a hook that was not given does nothing."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._init = _found(config.custom_megatron_init_path, "--custom-megatron-init-path")
        self._before_log_probs = _found(
            config.custom_megatron_before_log_prob_hook_path, "--custom-megatron-before-log-prob-hook-path"
        )
        self._before_step = _found(
            config.custom_megatron_before_train_step_hook_path, "--custom-megatron-before-train-step-hook-path"
        )
        self._provider = _found(config.custom_model_provider_path, "--custom-model-provider-path")

    def initialised(self) -> None:
        """The groups of ranks are there."""
        if self._init is not None:
            self._init(plugin_args(self._config))

    def before_log_probs(self, model: Sequence[Any], weights: str) -> None:
        if self._before_log_probs is not None:
            self._before_log_probs(plugin_args(self._config), list(model), _PREFIXES.get(weights, ""))

    def before_step(self, rollout_id: int, step_id: int, model: Sequence[Any], optimizer: Any, rates: Rates) -> None:
        if self._before_step is not None:
            self._before_step(plugin_args(self._config), rollout_id, step_id, list(model), optimizer, rates)

    def stage(self, settings: Any, first: bool, last: bool, vp_stage: int | None, default: Callable[[], Any]) -> Any:
        """A stage of a model: the user's, or what `default` makes."""
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


def _found(path: str | None, flag: str) -> Hook | None:
    return None if path is None else load_plugin(path, flag)
