"""`slime.run`: trains with flags given as keywords; its signature and its type stub are generated from the flags.

Invariant: the signature has every field of the config, and `slime/__init__.pyi` has the same parameters with types.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

from slime.config.config import FLAG_SPECS
from slime.config.parser import config_from_keywords

if TYPE_CHECKING:
    from slime.driver.inputs import TrainingResult

_TYPES = {
    "bool": "bool",
    "int": "int",
    "float": "float",
    "str": "str | PathLike[str]",
    "strs": "Sequence[str] | str",
    "ints": "Sequence[int] | int",
    "dict": "Mapping[str, Any] | str",
    "pairs": "Sequence[tuple[str, str]] | Mapping[str, str]",
}
"""Types of a keyword by the kind of its flag."""

_STUB = '''\
"""Made by `slime flags --stub > slime/__init__.pyi`."""

# fmt: off
# ruff: noqa: E501

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal

from slime.driver.inputs import TrainingResult

__version__: str

def run(
    *,
    reward: Callable[..., Any] | None = None,
    config: str | PathLike[str] | Sequence[str | PathLike[str]] | None = None,
    custom_config_path: str | PathLike[str] | None = None,
'''


def run(*, reward: Callable[..., object] | None = None, **flags: object) -> TrainingResult:
    """Train with the flags of the command line as keywords.

    `reward(args, sample)` may be given as a function. `config` and `custom_config_path` are files of flags. Flags of
    other programs (`sglang_...`, `router_...`, Megatron's) are accepted under their names. `slime flags WORDS` explains
    each flag.
    """
    config = config_from_keywords(flags)
    from slime.driver.loop import train

    return train(config, reward=reward)


_DEFAULTS = dict.fromkeys(("reward", "config", "custom_config_path")) | {
    spec.name: spec.default for spec in FLAG_SPECS.values()
}
run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        *(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
            for name, default in _DEFAULTS.items()
        ),
        inspect.Parameter("others", inspect.Parameter.VAR_KEYWORD),
    ],
    return_annotation="TrainingResult",
)


def format_stub() -> str:
    """Return the text of `slime/__init__.pyi`, which type checkers and editors read."""
    lines = []
    for spec in FLAG_SPECS.values():
        if spec.info.choices:
            choices = ", ".join(f'"{choice}"' for choice in spec.info.choices)
            value_type = f"Literal[{choices}]"
        else:
            value_type = _TYPES[spec.kind]
        lines.append(f"    {spec.name}: {value_type} | None = ...,\n")
    return _STUB + "".join(lines) + "    **others: Any,\n) -> TrainingResult: ...\n"
