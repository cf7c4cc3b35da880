"""Models that others published, by the name of their script: what their config.json says of their shape.

    {name: {"title": who it is, "like": another name (optional), "config": what differs from that one,
            "layout": {"cluster": machines x GPUs x GiB, "flags": how Megatron cuts it there}}}

Invariant: this is the only place where the size of a model is written down; scripts, documentation and plans are made
of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
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
