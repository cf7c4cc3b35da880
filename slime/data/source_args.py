"""The flags that data sources read, for callers whose `args` do not have them all.

Invariant: a config, or whatever else a run gives to its plugins, is used as it is. A plain namespace, as own drivers,
notebooks and tests write it, has its own values, and the flags' defaults for what it leaves out.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

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


def completed(args: Any) -> Any:
    """`args` with a value for every flag above."""
    return CompletedNamespace(args) if type(args) is Namespace else args


def changed(args: Any, changes: dict[str, Any]) -> Namespace:
    """The flags above as `args` has them, but for some."""
    return Namespace(**{**{name: getattr(args, name) for name in DEFAULTS}, **changes})


class CompletedNamespace:
    """A namespace that is read and written through, with defaults behind it."""

    def __init__(self, args: Namespace) -> None:
        object.__setattr__(self, "_args", args)

    def __getattr__(self, name: str) -> Any:
        given = vars(self.__dict__["_args"])
        if name in given:
            return given[name]
        if name == "disable_rollout_global_dataset":  # its name in parsers that store the opposite
            return not given.get("rollout_global_dataset", True)
        if name in DEFAULTS:
            return DEFAULTS[name]
        raise AttributeError(f"the namespace has no {name}")

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_args"], name, value)
