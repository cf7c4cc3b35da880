"""Content of the plugins' `args`: every flag under upstream's name and the values that upstream derives from them.

Invariant: a name has the same meaning as in upstream slime, and upstream's default if the flag is not given or does not
exist here. Values of the run override defaults. FSDP's trainers are data and context parallel, so every other parallel
size is 1 there, also if a script sets another one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from slime.algorithms.estimators import NONZERO_STD_FILTER
from slime.config.algorithm import has_critic, uses_importance_weights
from slime.config.batch import data_parallel_size
from slime.config.checks import LIVE_GENERATE, TRAFFIC_BASELINE
from slime.config.config import FLAG_SPECS, Config, coerce
from slime.config.datasets import all_datasets, eval_datasets, train_datasets
from slime.config.fields import flag_name
from slime.config.flag_aliases import UPSTREAM_DEFAULTS
from slime.config.flags.data import DEFAULT_DATA_SOURCE
from slime.config.flags.rollout import DEFAULT_ROLLOUT_FUNCTION, FULLY_ASYNC_ROLLOUT_FUNCTION, SFT_ROLLOUT_FUNCTION
from slime.config.megatron_flags import MEGATRON_DEFAULTS, MEGATRON_FLAGS, SWITCH
from slime.config.model_folder import read_shape
from slime.config.parallelism import expert_tensor_size, uses_megatron, virtual_stages
from slime.config.plugins import CONTRACTS, computed_with, constructor_values, load_plugin
from slime.config.plugins.args import PLAIN, RUN_MARK, Overlay, PluginArgs, is_same
from slime.errors import UserError
from slime.storage.json_types import JsonObject

CONFIG_ATTRIBUTE = "slime_config"
"""Attribute of a `parse_args` namespace with the config that it was built from."""

_DIFFERENT_IN_ARGS = ("eval_prompt_data",)
"""Flags whose value in `args` differs in form from the config's."""

_TRAINERS = {"rank": 0, "local_rank": 0, "attention_dropout": 0.0, "hidden_dropout": 0.0}
"""Values that scripts cannot change; other dropout is refused."""

_FSDP_SIZES = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
}
"""Values that scripts cannot change with FSDP, which shards the model differently."""


def plugin_args(config: Config) -> PluginArgs:
    """Return the `args` of plugins: one namespace for all copies of a config, which the run never reads."""
    return config.overlay.show(config, lambda: upstream_view(config))


def set_plugin_args(config: Config, **facts: object) -> None:
    """Set values of the plugins' `args` that are known only after the flags: a rank, an address."""
    plugin_args(config)
    config.overlay.tell(facts)


def with_own_overlay(config: Config) -> Config:
    """Return the config with an empty overlay, so that values written by plugins of another run are not visible."""
    return config.replace(overlay=Overlay())


def config_with_changed_args(config: Config, args: object) -> Config:
    """Apply the flags that were changed in a copy of the config's `args`, after checking their types."""
    base, values = plugin_args(config)._overlay.base, vars(args)
    changes = {
        name: _checked(name, values[name])
        for name in FLAG_SPECS
        if name in values and not is_same(values[name], base.get(name))
    }
    return config.replace(**changes) if changes else config


def own_namespace(config: Config) -> argparse.Namespace:
    """Return the `args` for a custom driver, which may change them and pass them to `train` (see `as_config`)."""
    args = argparse.Namespace(**vars(plugin_args(config)))
    setattr(args, CONFIG_ATTRIBUTE, config)
    return args


def as_config(args: Config | argparse.Namespace) -> Config:
    """Convert a namespace to a config, with the flags that were changed in it and the names that were added to it.

    A namespace of `parse_args` holds its config; in any other, missing flags get their defaults.
    """
    if isinstance(args, Config):
        return args
    kinds = [one for one in reversed(type(args).__mro__) if one.__module__ not in ("builtins", "argparse", "types")]
    public = {name: value for kind in kinds for name, value in vars(kind).items() if not name.startswith("_")}
    # class attributes also count: unit tests of users write a class instead of a namespace
    defaults = {name: value for name, value in public.items() if value is None or isinstance(value, PLAIN)}
    values: JsonObject = {**defaults, **vars(args)}
    config = values.get(CONFIG_ATTRIBUTE)
    if config is not None:
        config = config_with_changed_args(config, args)
        added = {name: value for name, value in values.items() if name not in config.overlay.base}
    else:
        known = {name for name in FLAG_SPECS if values.get(name) is not None and name not in _DIFFERENT_IN_ARGS}
        flags: JsonObject = {name: _checked(name, values[name]) for name in known}
        config = Config(**flags)
        added = {name: value for name, value in values.items() if name not in FLAG_SPECS}
    carried = {name: value for name, value in added.items() if isinstance(value, PLAIN) and name != RUN_MARK}
    return config.replace(carried={**config.carried, **carried})


def _checked(name: str, value: object) -> object:
    return None if value is None else coerce(FLAG_SPECS[name], value, f"args.{name}")


def upstream_view(config: Config) -> JsonObject:
    """Return all names and values of `args`: defaults, overridden first by the model, then the flags, then the run."""
    file = Path(config.hf_checkpoint or "") / "config.json"
    model = {name: number for name, (_, number) in read_shape(file).items()} if file.is_file() else {}
    trainers = (config.actor_num_nodes or 1) * (config.actor_num_gpus_per_node or 1)
    sizes: JsonObject = {**_FSDP_SIZES, "data_parallel_size": trainers // config.context_parallel_size}
    if uses_megatron(config):
        stages = virtual_stages(config, int(model.get("num_layers", 0)))
        sizes = {
            "expert_tensor_parallel_size": expert_tensor_size(config),
            "virtual_pipeline_model_parallel_size": stages if stages > 1 else None,
            "data_parallel_size": data_parallel_size(config),
        }
    view = {
        **{flag.replace("-", "_"): False if kind == SWITCH else None for flag, kind in MEGATRON_FLAGS.items()},
        **MEGATRON_DEFAULTS,
        **UPSTREAM_DEFAULTS,
        **config.carried,
        **model,
        **{name: None if spec.info.secret else getattr(config, name) for name, spec in FLAG_SPECS.items()},
        **_TRAINERS,
        **sizes,
        "world_size": trainers,
        "actor_num_gpus": trainers,
        "rollout_num_engines": num_engines(config),
        "rollout_external": bool(config.rollout_external_engine_addrs),
        "use_critic": has_critic(config),
        "use_tis": uses_importance_weights(config),
        "rollout_global_dataset": not config.disable_rollout_global_dataset,
        "rewards_normalization": not config.disable_rewards_normalization,
        "grpo_std_normalization": not config.disable_grpo_std_normalization and config.n_samples_per_prompt != 1,
        "compute_advantages_and_returns": not config.disable_compute_advantages_and_returns,
        "eval_prompt_data": [word for pair in config.eval_prompt_data or () for word in pair] or None,
        "eval_datasets": eval_datasets(config),
        "train_datasets": train_datasets(config),
        "rollout_skip_special_tokens": bool(config.rollout_skip_special_tokens),
        "carried": config.carried,
    }
    train_iters = None
    if config.num_rollout is not None and config.global_batch_size:
        train_samples = config.num_rollout * config.rollout_batch_size * config.n_samples_per_prompt
        train_iters = train_samples // config.global_batch_size
    fallbacks = {
        "input_key": "input",
        "eval_input_key": "input",
        "eval_max_context_len": config.rollout_max_context_len,
        "log_probs_max_tokens_per_gpu": config.max_tokens_per_gpu,
        "train_iters": train_iters,
        "padded_vocab_size": view["vocab_size"],
    }
    view |= {name: value for name, value in fallbacks.items() if view.get(name) is None}
    view["is_input_key_given"] = config.input_key is not None
    view["wandb_random_suffix"] = not view.get("disable_wandb_random_suffix")
    return view


def num_engines(args: Config | argparse.Namespace) -> int:
    """Return the number of engines of a run; a custom namespace may lack the flags that it does not use."""
    addresses = getattr(args, "rollout_external_engine_addrs", None)
    if addresses:
        return len(addresses)
    return max(1, (args.rollout_num_gpus or 1) // (getattr(args, "rollout_num_gpus_per_engine", None) or 1))


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
    """Raise a `UserError` unless all functions and classes of plugin flags can be imported and called."""
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


def _check_needs(found: Callable[..., object], config: Config, what: str) -> None:
    """Raise a `UserError` if the function computes with an `args` number that has no value when the run starts."""
    for name in computed_with(found):
        spec = FLAG_SPECS.get(name)
        comes_later = spec is None or bool(spec.info.derived) or spec.info.required or name == "num_rollout"
        if not comes_later and getattr(config, name) is None:
            raise UserError(
                f"{what} computes with args.{name}, which has no value: give {flag_name(name)}, or use a "
                f"default in the function (args.{name} or 1)"
            )
