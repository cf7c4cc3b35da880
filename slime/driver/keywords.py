"""`slime.run`: a training whose flags are keywords, with a signature and a stub that are made from the flags.

Invariant: the signature has every field of the config, and `slime/__init__.pyi` says the same with types.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slime.config.config import FLAG_SPECS
from slime.config.fields import FlagSpec
from slime.config.parser import config_of_keywords

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
"""What a keyword takes, by the kind of its flag."""

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


def run(*, reward: Callable[..., Any] | None = None, **flags: Any) -> TrainingResult:
    """Train with the flags of the command line as keywords.

    `reward(args, sample)` may be given as a function. `config` and `custom_config_path` are files of flags. Flags of
    others (`sglang_...`, `router_...`, Megatron's) are taken by their names, too; `slime flags WORDS` says what each
    flag means.
    """
    config = config_of_keywords(flags)
    from slime.driver.loop import train

    return train(config, reward=reward)


def _signature() -> inspect.Signature:
    keywords = {"reward": None, "config": None, "custom_config_path": None}
    keywords |= {spec.name: spec.default for spec in FLAG_SPECS.values()}
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default) for name, default in keywords.items()
    ]
    others = inspect.Parameter("others", inspect.Parameter.VAR_KEYWORD)
    return inspect.Signature([*parameters, others], return_annotation="TrainingResult")


run.__signature__ = _signature()  # type: ignore[attr-defined]


def format_stub() -> str:
    """What type checkers and editors read about the package."""
    lines = [f"    {spec.name}: {_type(spec)} = ..." for spec in FLAG_SPECS.values()]
    return _STUB + "".join(f"{line},\n" for line in lines) + "    **others: Any,\n) -> TrainingResult: ...\n"


def _type(spec: FlagSpec) -> str:
    if spec.info.choices:
        choices = ", ".join(f'"{choice}"' for choice in spec.info.choices)
        return f"Literal[{choices}] | None"
    return f"{_TYPES[spec.kind]} | None"
