"""The flags that data sources read, for callers whose `args` do not have them all.

Invariant: a config, or whatever else a run gives to its plugins, is used as it is. Any other object, as own drivers,
notebooks and tests make them, has its own values, and the flags' defaults for what it leaves out.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.data.prompt_rows import USUAL_KEY

DEFAULTS: dict[str, Any] = {
    "prompt_data": None,
    "prompt_config": None,
    "hf_checkpoint": None,
    "trust_remote_code": False,
    "input_key": None,
    "label_key": None,
    "metadata_key": "metadata",
    "tool_key": "tools",
    "multimodal_keys": None,
    "prompt_suffix": None,
    "apply_chat_template": False,
    "apply_chat_template_kwargs": {},
    "rollout_max_prompt_len": None,
    "rollout_max_context_len": None,
    "rollout_seed": 42,
    "rollout_shuffle": False,
    "rollout_batch_size": 32,
    "n_samples_per_prompt": 1,
    "num_data_workers": 0,
    "streaming_data": False,
    "buffer_filter_path": None,
    "save": None,
    "load": None,
    "rm_type": None,
    "custom_rm_path": None,
    "custom_generate_function_path": None,
    "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout",
    "data_source_path": "slime.rollout.data_source.RolloutDataSourceWithBuffer",
}

_READS_NONE = "disable_rollout_global_dataset"
"""A namespace may have the opposite, `rollout_global_dataset`, as parsers do; one that names no prompts reads none."""


def completed(args: Any) -> Any:
    """`args` if it has all flags above, as what a run gives has; else with a value for each that it lacks."""
    is_whole = all(hasattr(args, name) for name in (*DEFAULTS, _READS_NONE))
    return args if is_whole else CompletedNamespace(args)


def given_input_key(args: Any) -> str | None:
    """The column of the prompts; None where no flag names it and `args` of plugins have upstream's default instead."""
    is_default = not getattr(args, "is_input_key_given", True) and args.input_key == USUAL_KEY
    return None if is_default else args.input_key


def changed(args: Any, changes: dict[str, Any]) -> Namespace:
    """The flags above as `args` has them, but for some."""
    return Namespace(**{**{name: getattr(args, name) for name in DEFAULTS}, **changes})


class CompletedNamespace:
    """A namespace that is read and written through, with defaults behind it."""

    def __init__(self, args: Any) -> None:
        object.__setattr__(self, "_args", args)

    def __getattr__(self, name: str) -> Any:
        args = self.__dict__["_args"]
        if hasattr(args, name):
            return getattr(args, name)
        if name == _READS_NONE:
            names_none = getattr(args, "prompt_data", None) is None and getattr(args, "prompt_config", None) is None
            return not getattr(args, "rollout_global_dataset", not names_none)
        if name in DEFAULTS:
            return DEFAULTS[name]
        raise AttributeError(f"the namespace has no {name}")

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_args"], name, value)
