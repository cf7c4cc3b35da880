"""Flags that data sources read, with defaults for callers whose `args` lack some of them.

Invariant: a config and the plugin namespace of a run are used unchanged. Other objects (from a user's own driver, a
notebook or a test) keep their values and get the flags' defaults for the missing ones.
"""

from __future__ import annotations

from argparse import Namespace
from typing import cast

from slime.data.prompt_rows import USUAL_PROMPT_KEY
from slime.storage.json_types import JsonObject

DEFAULTS: dict[str, object] = {
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
"""A parser's namespace may have the inverse flag, `rollout_global_dataset`; without prompt files no dataset is read."""


def completed(args: object) -> Namespace:
    """Return `args` if it has all of the above flags, else a view of it with defaults for the missing ones."""
    is_whole = all(hasattr(args, name) for name in (*DEFAULTS, _READS_NONE))
    return cast(Namespace, args if is_whole else NamespaceWithDefaults(args))


def given_input_key(args: Namespace) -> str | None:
    """Return the prompt column; None if no flag names it and plugin `args` only have upstream's default."""
    is_default = not getattr(args, "is_input_key_given", True) and args.input_key == USUAL_PROMPT_KEY
    return None if is_default else args.input_key


def changed(args: Namespace, changes: JsonObject) -> Namespace:
    """Return a new namespace with the above flags of `args`, updated with `changes`."""
    return Namespace(**{**{name: getattr(args, name) for name in DEFAULTS}, **changes})


class NamespaceWithDefaults:
    """View of a namespace that adds default values; reads and writes go to the namespace."""

    def __init__(self, args: object) -> None:
        object.__setattr__(self, "_args", args)

    def __getattr__(self, name: str) -> object:
        args = self.__dict__["_args"]
        if hasattr(args, name):
            return getattr(args, name)
        if name == _READS_NONE:
            names_none = getattr(args, "prompt_data", None) is None and getattr(args, "prompt_config", None) is None
            return not getattr(args, "rollout_global_dataset", not names_none)
        if name in DEFAULTS:
            return DEFAULTS[name]
        raise AttributeError(f"the namespace has no {name}")

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.__dict__["_args"], name, value)
