"""Catalog of published models, by the name of their script, with the shape fields of their config.json.

    {name: {"title": the model, "like": another name (optional), "config": fields that differ from that one,
            "layout": {"cluster": machines x GPUs x GiB, "flags": Megatron's parallelism there}}}

Invariant: this is the only place where the size of a model is written down; scripts, documentation and plans are
generated from it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from slime.errors import UserError
from slime.storage.json_types import JsonObject

_FILE = Path(__file__).with_name("published.json")


@dataclass(frozen=True)
class PublishedModel:
    """A published model; `title` names the hub folders that have this shape, and the differences of others."""

    name: str
    title: str
    config: JsonObject
    cluster: str
    """GPUs that it can be trained on, as `--plan-cluster` takes them."""
    layout: tuple[str, ...]
    """Megatron's parallelism on these GPUs, as flags."""

    def with_fields(self, assignments: Sequence[str]) -> PublishedModel:
        """Return the model with other values in its config.json: `num_hidden_layers=4`, the value as JSON or a word."""
        config = dict(self.config)
        for assignment in assignments:
            field, equals, text = assignment.partition("=")
            if not equals:
                raise UserError(f"--set {assignment} is not of the form FIELD=VALUE, such as num_hidden_layers=4")
            if field not in config:
                near = get_close_matches(field, config, n=1)
                hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(config)}"
                raise UserError(f"--set {assignment}: the config.json of {self.name} has no {field}; {hint}")
            try:
                config[field] = json.loads(text)
            except ValueError:
                config[field] = text
        return replace(self, config=config)

    def write(self, folder: Path) -> None:
        """Write a folder with config.json alone: enough for `slime plan`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")


def published_models() -> dict[str, PublishedModel]:
    """All models of the catalog, in the order of their names."""
    entries: dict[str, JsonObject] = json.loads(_FILE.read_text(encoding="utf-8"))
    models = {}
    for name, entry in entries.items():
        source = entry
        while "layout" not in source:
            source = entries[source["like"]]
        layout, config = source["layout"], _config(entries, name)
        models[name] = PublishedModel(name, entry["title"], config, layout["cluster"], tuple(layout["flags"].split()))
    return models


def published_model(name: str) -> PublishedModel:
    models = published_models()
    if name not in models:
        raise UserError(f"{name} is not in the catalog of models whose shape is known: `slime models` lists them")
    return models[name]


def _config(entries: dict[str, JsonObject], name: str) -> JsonObject:
    """The config of an entry, merged over those of the models that it is like."""
    entry = entries[name]
    base = _config(entries, entry["like"]) if "like" in entry else {}
    return {**base, **entry["config"]}
