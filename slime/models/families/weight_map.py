"""Which tensors of a model folder a Megatron parameter is made of.

Invariant: names on Megatron's side are global: layers count over pipeline stages, experts over expert-parallel ranks.
Names on the other side are those of the folder. A rule with `is_copy` is read and never written: another rule owns the
same tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from slime.models.families.tp_sharding import Form, Vocab


@dataclasses.dataclass(frozen=True)
class Entry:
    """One Megatron parameter."""

    megatron: str
    hf: tuple[str, ...]
    form: Form
    is_expert: bool = False
    """Whether expert-tensor-parallel ranks share it, and expert-parallel ranks have different ones."""
    is_copy: bool = False


@dataclasses.dataclass(frozen=True)
class Rule:
    """One Megatron parameter of some layers; templates have places for {layer} and {expert}."""

    megatron: str
    hf: tuple[str, ...]
    form: Form
    layers: tuple[int, ...] | None = None
    """Which layers have it; None for what is in no layer."""
    experts: int = 0
    """How many experts each layer has of it; 0 for what is no expert's."""
    is_copy: bool = False
    stacked: tuple[str, Form] | None = None
    """The tensor that holds all experts of a layer, in folders that have one, and its form."""

    def entries(self) -> Iterator[Entry]:
        for layer in (0,) if self.layers is None else self.layers:
            for expert in range(self.experts or 1):
                yield Entry(
                    self.megatron.format(layer=layer, expert=expert),
                    tuple(name.format(layer=layer, expert=expert) for name in self.hf),
                    self.form.of_expert(expert),
                    self.experts > 0,
                    self.is_copy,
                )


def entries_by_name(rules: Iterable[Rule]) -> dict[str, Entry]:
    """Every parameter of a model under its global Megatron name."""
    return {entry.megatron: entry for rule in rules for entry in rule.entries()}


def with_vocab_divisor(rules: Iterable[Rule], divisible_by: int) -> tuple[Rule, ...]:
    """The rules under another --make-vocab-size-divisible-by than Megatron's default of 128."""
    return tuple(
        dataclasses.replace(rule, form=Vocab(divisible_by)) if isinstance(rule.form, Vocab) else rule for rule in rules
    )


_TEXT_PREFIXES = ("model.language_model.", "language_model.model.")


def as_in_folder(rules: Iterable[Rule], names: Collection[str]) -> tuple[Rule, ...]:
    """The rules in a folder's own names: those of a multimodal model have the text under another prefix, and some keep
    the experts of a layer in one tensor."""
    found = []
    for rule in rules:
        first = next(rule.entries(), None)
        if first is None or all(name in names for name in first.hf):
            found.append(rule)
            continue
        found.append(next((other for other in _others(rule) if next(other.entries()).hf[0] in names), rule))
    return tuple(found)


def _others(rule: Rule) -> Iterator[Rule]:
    variants = [rule]
    if rule.stacked is not None:
        name, form = rule.stacked
        variants.append(dataclasses.replace(rule, hf=(name,), form=form))
    for variant in variants:
        yield variant
        for prefix in _TEXT_PREFIXES:
            yield dataclasses.replace(variant, hf=tuple(_moved(name, prefix) for name in variant.hf))


def _moved(name: str, prefix: str) -> str:
    if name.startswith("model."):
        return prefix + name.removeprefix("model.")
    return prefix.removesuffix("model.") + name


# What the project knows about a model family.
#
# Invariant: everything a family says about a model is computed from its config.json, so that no size is written twice.

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
