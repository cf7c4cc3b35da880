"""Plugins: loading the user's functions by name (`loading`) and the contract of each flag (`contracts`)."""

from slime.config.plugins.contracts import (
    CONTRACTS,
    Contract,
    check,
    check_given,
    computed_with,
    constructor_values,
    contract_of,
    is_async,
    takes_nothing,
    takes_samples,
)
from slime.config.plugins.loading import load_function, load_plugin, present_path

__all__ = [
    "CONTRACTS",
    "Contract",
    "check",
    "check_given",
    "computed_with",
    "constructor_values",
    "contract_of",
    "is_async",
    "load_function",
    "load_plugin",
    "present_path",
    "takes_nothing",
    "takes_samples",
]
