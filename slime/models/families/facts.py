"""What the project knows about a model family.

Invariant: everything a family says about a model is computed from its config.json, so that no size is written twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slime.models.families.rules import Rule

HfConfig = dict[str, Any]
"""config.json with the part about text folded in."""

Fields = dict[str, Any]
"""Megatron's names and values: fields of TransformerConfig and arguments of GPTModel, as plain values. Functions are
names (`activation_func: "silu"`), layer lists hold one number a layer. `vocab_size` is that of the folder, unpadded."""


@dataclass(frozen=True)
class Support:
    """What runs a family: None where it works, else the sentence why not."""

    engine: str | None = None
    fsdp: str | None = None
    megatron: str | None = None


@dataclass(frozen=True)
class Ignored:
    """Tensors of a folder that no parameter is made of, by the beginning of their names, and why."""

    prefix: str
    why: str


@dataclass(frozen=True)
class Family:
    name: str
    model_types: tuple[str, ...]
    fields: Callable[[HfConfig], Fields]
    rules: Callable[[HfConfig], tuple[Rule, ...]]
    tool_format: str | None
    """SGLang's name of the tool-call parser; None where there is none for the family."""
    reasoning_format: str | None
    """SGLang's name of the reasoning parser; None where the family does not think aloud."""
    stop_tokens: tuple[str, ...]
    """The tokens that end a turn."""
    support: Support = field(default_factory=Support)
    ignored: Callable[[HfConfig], tuple[Ignored, ...]] = lambda config: ()
