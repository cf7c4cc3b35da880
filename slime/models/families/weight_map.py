"""Rules that map the tensors of a model folder to Megatron parameters, and the description of a model family.

Invariant: names on Megatron's side are global: layers count over pipeline stages, experts over expert-parallel ranks.
Names on the other side are those of the folder. A rule with `is_copy` is read and never written: another rule owns the
same tensors. Everything that a family says about a model is computed from its config.json, so that no size is written
down twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from slime.models.families.tp_sharding import Form, Vocab
from slime.storage.json_types import JsonObject


@dataclasses.dataclass(frozen=True)
class ParameterEntry:
    """One Megatron parameter and the folder's tensors that form it."""

    megatron: str
    hf: tuple[str, ...]
    form: Form
    is_expert: bool = False
    """Sharded over expert-tensor-parallel ranks; expert-parallel ranks hold different experts."""
    is_copy: bool = False


@dataclasses.dataclass(frozen=True)
class Rule:
    """A template of one Megatron parameter in some layers, with the placeholders {layer} and {expert}."""

    megatron: str
    hf: tuple[str, ...]
    form: Form
    layers: tuple[int, ...] | None = None
    """The layers that have it; None for a parameter outside the layers."""
    experts: int = 0
    """Number of experts of each layer that have it; 0 for a parameter that does not belong to experts."""
    is_copy: bool = False
    stacked: tuple[str, Form] | None = None
    """For folders with one tensor for all experts of a layer: its name and its form."""

    def entries(self) -> Iterator[ParameterEntry]:
        for layer in (0,) if self.layers is None else self.layers:
            for expert in range(self.experts or 1):
                yield ParameterEntry(
                    self.megatron.format(layer=layer, expert=expert),
                    tuple(name.format(layer=layer, expert=expert) for name in self.hf),
                    self.form.of_expert(expert),
                    self.experts > 0,
                    self.is_copy,
                )


def entries_by_name(rules: Iterable[Rule]) -> dict[str, ParameterEntry]:
    """All parameters of a model, by global Megatron name."""
    return {entry.megatron: entry for rule in rules for entry in rule.entries()}


def with_vocab_divisor(rules: Iterable[Rule], divisible_by: int) -> tuple[Rule, ...]:
    """Return the rules for another --make-vocab-size-divisible-by than Megatron's default of 128."""
    return tuple(
        dataclasses.replace(rule, form=Vocab(divisible_by)) if isinstance(rule.form, Vocab) else rule for rule in rules
    )


_TEXT_PREFIXES = ("model.language_model.", "language_model.model.")


def rules_for_folder(rules: Iterable[Rule], names: Collection[str]) -> tuple[Rule, ...]:
    """Return the rules with the names of a folder: folders of multimodal models have another prefix for text, and some
    folders have all experts of a layer in one tensor."""
    found = []
    for rule in rules:
        first = next(rule.entries(), None)
        if first is None or all(name in names for name in first.hf):
            found.append(rule)
            continue
        found.append(next((other for other in _rule_variants(rule) if next(other.entries()).hf[0] in names), rule))
    return tuple(found)


def _rule_variants(rule: Rule) -> Iterator[Rule]:
    """The rule with stacked experts and with other prefixes for text."""
    variants = [rule]
    if rule.stacked is not None:
        name, form = rule.stacked
        variants.append(dataclasses.replace(rule, hf=(name,), form=form))
    for variant in variants:
        yield variant
        for prefix in _TEXT_PREFIXES:
            moved = (
                prefix + name.removeprefix("model.")
                if name.startswith("model.")
                else prefix.removesuffix("model.") + name
                for name in variant.hf
            )
            yield dataclasses.replace(variant, hf=tuple(moved))


HfConfig = JsonObject
"""config.json, merged with its text config."""

Fields = JsonObject
"""Megatron's names and values: fields of TransformerConfig and arguments of GPTModel, as plain values. Functions are
names (`activation_func: "silu"`), layer lists hold one number per layer. `vocab_size` is that of the folder, unpadded.
"""


@dataclass(frozen=True)
class Support:
    """Support of a family by engine and backends: None if it works, else the reason why it does not."""

    engine: str | None = None
    fsdp: str | None = None
    megatron: str | None = None


@dataclass(frozen=True)
class Ignored:
    """Tensors of a folder that no parameter uses, by the prefix of their names, and the reason."""

    prefix: str
    why: str


@dataclass(frozen=True)
class Family:
    name: str
    model_types: tuple[str, ...]
    fields: Callable[[HfConfig], Fields]
    rules: Callable[[HfConfig], tuple[Rule, ...]]
    tool_format: str | None
    """SGLang's name of the tool-call parser; None if the family has none."""
    reasoning_format: str | None
    """SGLang's name of the reasoning parser; None if the family writes no reasoning."""
    stop_tokens: tuple[str, ...]
    """The tokens that end a turn."""
    support: Support = field(default_factory=Support)
    ignored: Callable[[HfConfig], tuple[Ignored, ...]] = lambda config: ()
