"""A model folder of a known family: what its tensors are for, and where their numbers come from.

Invariant: every Megatron parameter of the model finds its tensors in the folder, and every tensor of the folder is some
parameter's or is left alone for a reason that is said. Embedding and output layer are one where config.json says so and
the folder has not two that differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slime.errors import UserError
from slime.models.dequantized import plain_sources
from slime.models.families.family import family_of
from slime.models.families.hf_config import is_tied
from slime.models.families.tp_sharding import Shard
from slime.models.families.weight_map import (
    Entry,
    Family,
    Fields,
    HfConfig,
    as_in_folder,
    entries_by_name,
    with_vocab_divisor,
)
from slime.models.folder import read_text_config
from slime.models.tensor_sources import Source, same_numbers


@dataclass(frozen=True)
class FamilyFolder:
    path: Path
    config: HfConfig
    """config.json with the part about text folded in."""
    family: Family
    entries: dict[str, Entry]
    """By the global Megatron name."""
    sources: dict[str, Source]
    """By the folder's own name."""

    @property
    def fields(self) -> Fields:
        return self.family.fields(self.config)

    def shard(self, entry: Entry, rank: int, size: int) -> Shard:
        """What one rank holds of a parameter."""
        return entry.form.shard([self.sources[name].shape for name in entry.hf], rank, size)

    def left_alone(self) -> dict[str, str]:
        """Tensors of the folder that no parameter is made of, and why."""
        used = {name for entry in self.entries.values() for name in entry.hf}
        return {name: _reason(name, self) for name in self.sources if name not in used}

    def left_alone_in_words(self) -> list[str]:
        """A sentence for each reason."""
        by_reason: dict[str, list[str]] = {}
        for name, why in self.left_alone().items():
            by_reason.setdefault(why, []).append(name)
        return [
            f"{len(names)} tensors of {self.path} ({names[0]}, say) are neither trained nor written: {why}"
            for why, names in by_reason.items()
        ]


def open_family_folder(folder: str | Path, *, vocab_divisor: int = 128) -> FamilyFolder:
    """Read nothing but config.json and the headers of the weight files; UserError for what does not fit together."""
    config = read_text_config(folder)
    family = family_of(config)
    sources = plain_sources(Path(folder))
    if is_tied(config) and not _is_one(sources, "embed_tokens.weight", "lm_head.weight"):
        config = {**config, "tie_word_embeddings": False}
    rules = with_vocab_divisor(as_in_folder(family.rules(config), sources), vocab_divisor)
    opened = FamilyFolder(Path(folder), config, family, entries_by_name(rules), sources)
    _refuse_missing(opened, (name for entry in opened.entries.values() for name in entry.hf))
    opened.left_alone()
    return opened


def _is_one(sources: dict[str, Source], *names: str) -> bool:
    """Whether the folder has not both of two tied tensors, or has the same numbers in both: as transformers sees it."""
    found = [source for name in names for own, source in sources.items() if own.endswith(f".{name}") or own == name]
    return len(found) < 2 or same_numbers(*found)


def _refuse_missing(folder: FamilyFolder, wanted: Iterable[str]) -> None:
    missing = [name for name in wanted if name not in folder.sources]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"the weights in {folder.path} lack {missing[0]}{more}: download the model folder again")


def _reason(name: str, folder: FamilyFolder) -> str:
    for ignored in folder.family.ignored(folder.config):
        if name.startswith(ignored.prefix):
            return ignored.why
    if name.endswith("rotary_emb.inv_freq"):
        return "it is computed from config.json"
    if name.endswith("lm_head.weight"):
        return "the output layer is the embedding, by tie_word_embeddings"
    raise UserError(
        f"{name} in {folder.path} is no weight that a {folder.family.name} model has, and would be lost: the folder is "
        "another model's"
    )
