"""A model folder of a supported family: its Megatron parameters and the sources of their tensors.

Invariant: the folder has the tensors of every Megatron parameter, and every tensor of the folder belongs to a parameter
or is ignored for a reported reason. Embedding and output layer are tied if config.json says so, unless the folder has
both tensors and they differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slime.errors import UserError
from slime.models.dequantized import plain_sources
from slime.models.families.family import family_of
from slime.models.families.hf_config import is_tied
from slime.models.families.tp_sharding import Shard
from slime.models.families.weight_map import (
    Family,
    Fields,
    HfConfig,
    ParameterEntry,
    entries_by_name,
    rules_for_folder,
    with_vocab_divisor,
)
from slime.models.folder import read_text_config
from slime.models.tensor_sources import Source, sources_equal


@dataclass(frozen=True)
class FamilyFolder:
    path: Path
    config: HfConfig
    """config.json, merged with its text config."""
    family: Family
    entries: dict[str, ParameterEntry]
    """By global Megatron name."""
    sources: dict[str, Source]
    """By the folder's own name."""

    @property
    def fields(self) -> Fields:
        return self.family.fields(self.config)

    def shard(self, entry: ParameterEntry, rank: int, size: int) -> Shard:
        """The part of a parameter that one rank holds."""
        return entry.form.shard([self.sources[name].shape for name in entry.hf], rank, size)

    def unused_tensors(self) -> dict[str, str]:
        """Tensors of the folder that no parameter uses, each with the reason; UserError for one that has no reason."""
        used = {name for entry in self.entries.values() for name in entry.hf}
        return {name: _unused_reason(name, self) for name in self.sources if name not in used}

    def unused_tensor_notes(self) -> list[str]:
        """One sentence for each reason why tensors of the folder are not used."""
        by_reason: dict[str, list[str]] = {}
        for name, why in self.unused_tensors().items():
            by_reason.setdefault(why, []).append(name)
        return [
            f"{len(names)} tensors of {self.path} (such as {names[0]}) are neither trained nor written: {why}"
            for why, names in by_reason.items()
        ]


def open_family_folder(folder: str | Path, *, vocab_divisor: int = 128) -> FamilyFolder:
    """Open a folder by config.json and the headers of its weight files; UserError if they do not fit together.

    Weights are read only to compare two tensors that config.json ties: as in transformers, two that differ are not
    tied.
    """
    config = read_text_config(folder)
    family = family_of(config)
    sources = plain_sources(Path(folder))
    if is_tied(config):
        tied = [
            source
            for name in ("embed_tokens.weight", "lm_head.weight")
            for own, source in sources.items()
            if own.endswith(f".{name}") or own == name
        ]
        if len(tied) >= 2 and not sources_equal(*tied):
            config = {**config, "tie_word_embeddings": False}
    rules = with_vocab_divisor(rules_for_folder(family.rules(config), sources), vocab_divisor)
    opened = FamilyFolder(Path(folder), config, family, entries_by_name(rules), sources)
    missing = [name for entry in opened.entries.values() for name in entry.hf if name not in sources]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"the weights in {opened.path} lack {missing[0]}{more}: download the model folder again")
    opened.unused_tensors()
    return opened


def _unused_reason(name: str, folder: FamilyFolder) -> str:
    """The reason why no parameter uses a tensor; UserError if there is none."""
    for ignored in folder.family.ignored(folder.config):
        if name.startswith(ignored.prefix):
            return ignored.why
    if name.endswith("rotary_emb.inv_freq"):
        return "it is computed from config.json"
    if name.endswith("lm_head.weight"):
        return "the output layer is the embedding, by tie_word_embeddings"
    raise UserError(
        f"{name} in {folder.path} is not a weight of a {folder.family.name} model and would be lost: the folder holds "
        "another model"
    )
