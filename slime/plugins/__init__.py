"""Functions of the user: finding them by name (`loading`) and what each flag expects of them (`contracts`)."""

from slime.plugins.contracts import (
    CONTRACTS,
    Contract,
    check,
    check_given,
    constructor_values,
    contract_of,
    is_async,
    takes_nothing,
    takes_samples,
)
from slime.plugins.loading import load_function, load_plugin
from slime.plugins.needs import computed_with

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
    "takes_nothing",
    "takes_samples",
]
