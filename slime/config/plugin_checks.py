"""The functions and classes that flags name: found, callable the way they will be called, and given what they need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime.algorithms.estimators import NONZERO_STD_FILTER
from slime.config.config import FLAG_SPECS, Config
from slime.config.groups.asynchronous import FULLY_ASYNC_ROLLOUT_FUNCTION
from slime.config.groups.data import DEFAULT_DATA_SOURCE
from slime.config.groups.rollout import DEFAULT_ROLLOUT_FUNCTION, SFT_ROLLOUT_FUNCTION
from slime.config.live import LIVE_GENERATE, TRAFFIC_BASELINE
from slime.config.plugin_args import plugin_args
from slime.config.spec import flag_name
from slime.config.train_datasets import all_datasets
from slime.errors import UserError
from slime.plugins import CONTRACTS, computed_with, constructor_values, load_plugin

_BUILT_IN = (
    DEFAULT_DATA_SOURCE,
    DEFAULT_ROLLOUT_FUNCTION,
    FULLY_ASYNC_ROLLOUT_FUNCTION,
    SFT_ROLLOUT_FUNCTION,
    NONZERO_STD_FILTER,
    LIVE_GENERATE,
    TRAFFIC_BASELINE,
)


def check_plugins(config: Config) -> None:
    """Every function and class the user named imports and can be called the way it will be."""
    for contract in CONTRACTS:
        named = getattr(config, contract.field_name)
        for path in named if isinstance(named, list) else [named]:
            if path is None or path in _BUILT_IN:
                continue
            found = load_plugin(path, contract.flag)
            if isinstance(found, type) and not contract.is_class:
                constructor_values(found, config, plugin_args(config), f"{contract.flag} {path}")
            _check_needs(found, config, f"{contract.flag} {path}")
    for dataset in all_datasets(config):
        for flag, path in (
            ("--custom-generate-function-path", dataset.custom_generate_function_path),
            ("--custom-rm-path", dataset.custom_rm_path),
        ):
            if path is not None:
                _check_needs(load_plugin(path, flag), config, f"{flag} {path}")


def _check_needs(found: Callable[..., Any], config: Config, what: str) -> None:
    """A number that the function computes with has a value: given, or known when the run starts."""
    for name in computed_with(found):
        spec = FLAG_SPECS.get(name)
        comes_later = spec is None or bool(spec.info.derived) or spec.info.required or name == "num_rollout"
        if not comes_later and getattr(config, name) is None:
            raise UserError(
                f"{what} computes with args.{name}, which has no value: give {flag_name(name)}, or let the function "
                f"choose one (args.{name} or 1)"
            )
