"""What `args` says to plugins: every flag under upstream's name, and the values upstream derives from them.

Invariant: a name means here what it means in upstream slime, and has upstream's default where the flag was not given
or does not exist here. Values of the run go before defaults. FSDP's trainers are data and context parallel, so every
other kind of parallelism has the size 1 there, whatever a script says.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from slime.config.algorithm import has_critic, weighs_importance
from slime.config.batch import data_parallel_size
from slime.config.config import FLAG_SPECS, Config
from slime.config.eval_datasets import eval_datasets
from slime.config.layout import expert_tensor_size, uses_megatron, virtual_stages
from slime.config.megatron_flags import MEGATRON_FLAGS, SWITCH
from slime.config.shape_flags import shape_of
from slime.config.train_datasets import train_datasets
from slime.config.upstream_defaults import MEGATRON_DEFAULTS, UPSTREAM_DEFAULTS
from slime.config.values import coerce
from slime.plugins.args import PLAIN, RUN_MARK, Overlay, PluginArgs, is_same

OF_CONFIG = "slime_config"
"""The attribute of a namespace of `parse_args` that has the config it was made of."""

_SHOWN_OTHERWISE = ("eval_prompt_data",)
"""Flags that plugins see in another form than the config has them in."""

_TRAINERS = {"rank": 0, "local_rank": 0, "attention_dropout": 0.0, "hidden_dropout": 0.0}
"""What the trainers are, whatever a script says of its own; other dropout is refused."""

_OF_FSDP = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
}
"""The same of FSDP's trainers: the model is cut otherwise."""


def plugin_args(config: Config) -> PluginArgs:
    """The `args` of plugins: one namespace for all copies of a config, which the run never reads."""
    return config.overlay.show(config, lambda: upstream_view(config))


def tell_plugins(config: Config, **facts: Any) -> None:
    """Say what became known only after the flags: a rank, an address."""
    plugin_args(config)
    config.overlay.tell(facts)


def with_own_overlay(config: Config) -> Config:
    """The config for a run of its own: nothing that plugins of another run wrote is seen."""
    return config.replace(overlay=Overlay())


def changed_by(config: Config, args: object) -> Config:
    """The config as a copy of its `args` says it: flags that were changed there since, checked for their types."""
    base, values = plugin_args(config)._overlay.base, vars(args)
    changes = {
        name: _checked(name, values[name])
        for name in FLAG_SPECS
        if name in values and not is_same(values[name], base.get(name))
    }
    return config.replace(**changes) if changes else config


def own_namespace(config: Config) -> argparse.Namespace:
    """The `args` of somebody's own driver, to be read, changed and given to `train`: see `as_config`."""
    args = argparse.Namespace(**vars(plugin_args(config)))
    setattr(args, OF_CONFIG, config)
    return args


def as_config(args: Config | argparse.Namespace) -> Config:
    """What a namespace says, as a config: flags that were changed in it count, and so do names that were added to it.

    One that `parse_args` made knows its config; of any other one, flags that it does not have get their defaults.
    """
    if isinstance(args, Config):
        return args
    values = {**_of_classes(type(args)), **vars(args)}
    config = values.get(OF_CONFIG)
    if config is not None:
        config = changed_by(config, args)
        added = {name: value for name, value in values.items() if name not in config.overlay.base}
    else:
        known = {name for name in FLAG_SPECS if values.get(name) is not None and name not in _SHOWN_OTHERWISE}
        config = Config(**{name: _checked(name, values[name]) for name in known})
        added = {name: value for name, value in values.items() if name not in FLAG_SPECS}
    carried = {name: value for name, value in added.items() if isinstance(value, PLAIN) and name != RUN_MARK}
    return config.replace(carried={**config.carried, **carried})


def _of_classes(kind: type) -> dict[str, Any]:
    """What a class of the user's, as unit tests write them, says in the place of its objects."""
    classes = [one for one in reversed(kind.__mro__) if one.__module__ not in ("builtins", "argparse", "types")]
    found = {name: value for one in classes for name, value in vars(one).items() if not name.startswith("_")}
    return {name: value for name, value in found.items() if value is None or isinstance(value, PLAIN)}


def _checked(name: str, value: Any) -> Any:
    return None if value is None else coerce(FLAG_SPECS[name], value, f"args.{name}")


def upstream_view(config: Config) -> dict[str, Any]:
    """All names and values: defaults first, then what the model, the flags and the run say, each over the former."""
    view = {
        **{flag.replace("-", "_"): False if kind == SWITCH else None for flag, kind in MEGATRON_FLAGS.items()},
        **MEGATRON_DEFAULTS,
        **UPSTREAM_DEFAULTS,
        **config.carried,
        **_model_facts(config),
        **{name: None if spec.info.secret else getattr(config, name) for name, spec in FLAG_SPECS.items()},
        **_derived(config),
        "carried": config.carried,
    }
    fallbacks = {
        "input_key": "input",
        "eval_input_key": "input",
        "eval_max_context_len": config.rollout_max_context_len,
        "log_probs_max_tokens_per_gpu": config.max_tokens_per_gpu,
        "train_iters": _train_iters(config),
        "padded_vocab_size": view["vocab_size"],
    }
    view |= {name: value for name, value in fallbacks.items() if view.get(name) is None}
    view["is_input_key_given"] = config.input_key is not None
    view["wandb_random_suffix"] = not view.get("disable_wandb_random_suffix")
    return view


def _derived(config: Config) -> dict[str, Any]:
    trainers = (config.actor_num_nodes or 1) * (config.actor_num_gpus_per_node or 1)
    return {
        **_TRAINERS,
        **_parallel_sizes(config, trainers),
        "world_size": trainers,
        "actor_num_gpus": trainers,
        "rollout_num_engines": num_engines(config),
        "rollout_external": bool(config.rollout_external_engine_addrs),
        "use_critic": has_critic(config),
        "use_tis": weighs_importance(config),
        "rollout_global_dataset": not config.disable_rollout_global_dataset,
        "rewards_normalization": not config.disable_rewards_normalization,
        "grpo_std_normalization": not config.disable_grpo_std_normalization and config.n_samples_per_prompt != 1,
        "compute_advantages_and_returns": not config.disable_compute_advantages_and_returns,
        "eval_prompt_data": [word for pair in config.eval_prompt_data or () for word in pair] or None,
        "eval_datasets": eval_datasets(config),
        "train_datasets": train_datasets(config),
        "rollout_skip_special_tokens": bool(config.rollout_skip_special_tokens),
    }


def _parallel_sizes(config: Config, trainers: int) -> dict[str, Any]:
    if not uses_megatron(config):
        return {**_OF_FSDP, "data_parallel_size": trainers // config.context_parallel_size}
    num_layers = _model_facts(config).get("num_layers", 0)
    stages = virtual_stages(config, int(num_layers))
    return {
        "expert_tensor_parallel_size": expert_tensor_size(config),
        "virtual_pipeline_model_parallel_size": stages if stages > 1 else None,
        "data_parallel_size": data_parallel_size(config),
    }


def num_engines(args: Any) -> int:
    """How many engines a run has; a namespace of the user's may leave out what it does not use."""
    addresses = getattr(args, "rollout_external_engine_addrs", None)
    if addresses:
        return len(addresses)
    return max(1, (args.rollout_num_gpus or 1) // (getattr(args, "rollout_num_gpus_per_engine", None) or 1))


def _train_iters(config: Config) -> int | None:
    if config.num_rollout is None or not config.global_batch_size:
        return None
    return config.num_rollout * config.rollout_batch_size * config.n_samples_per_prompt // config.global_batch_size


def _model_facts(config: Config) -> dict[str, Any]:
    """The shape of the model, as far as its folder says."""
    file = Path(config.hf_checkpoint or "") / "config.json"
    return shape_of(file) if file.is_file() else {}
