"""Models that others published, by the name of their script: what their config.json says of their shape.

    {name: {"title": who it is, "like": another name (optional), "config": what differs from that one,
            "layout": {"cluster": machines x GPUs x GiB, "flags": how Megatron cuts it there}}}

Invariant: this is the only place where the size of a model is written down; scripts, documentation and plans are made
of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from slime.errors import UserError

_FILE = Path(__file__).with_name("published.json")


@dataclass(frozen=True)
class Published:
    """A model; `title` says which folders of the hub have this shape, and what others have instead."""

    name: str
    title: str
    config: dict[str, Any]
    cluster: str
    """GPUs that it can be trained on, as `--plan-cluster` takes them."""
    layout: tuple[str, ...]
    """How Megatron cuts it over them, as flags."""

    def with_fields(self, assignments: Sequence[str]) -> Published:
        """The model with other values in its config.json: `num_hidden_layers=4`, the value as JSON or as a word."""
        config = dict(self.config)
        for assignment in assignments:
            field, equals, text = assignment.partition("=")
            if not equals:
                raise UserError(f"--set {assignment} is no FIELD=VALUE: such as num_hidden_layers=4")
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
        """A folder that can be planned with, without weights."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")


def published_models() -> dict[str, Published]:
    """All of them, in the order of their names."""
    entries: dict[str, dict[str, Any]] = json.loads(_FILE.read_text(encoding="utf-8"))
    return {name: _published(entries, name) for name in entries}


def published_model(name: str) -> Published:
    models = published_models()
    if name not in models:
        raise UserError(f"{name} is none of the models whose shape is known: slime models lists them")
    return models[name]


def _published(entries: dict[str, dict[str, Any]], name: str) -> Published:
    entry, source = entries[name], entries[name]
    while "layout" not in source:
        source = entries[source["like"]]
    layout = source["layout"]
    return Published(name, entry["title"], _config(entries, name), layout["cluster"], tuple(layout["flags"].split()))


def _config(entries: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    entry = entries[name]
    base = _config(entries, entry["like"]) if "like" in entry else {}
    return {**base, **entry["config"]}
