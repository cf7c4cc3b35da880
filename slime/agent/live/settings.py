"""What the process of the endpoints is told of a live service, and the file in which clients find it."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ADDRESS_FILE = "live.json"


@dataclass(frozen=True)
class LiveSettings:
    """`key` is what all clients have; `params` and `limits` are those of every conversation (`Opening`)."""

    key: str = field(repr=False)
    store: str
    params: Mapping[str, Any]
    limits: Mapping[str, Any]
    template_kwargs: Mapping[str, Any]
    strict: bool = False
    routing: bool = False
    filter_path: str | None = None
    idle_s: float = 600.0
    most_conversations: int = 4096


def kept_key(folder: Path) -> str:
    """The key of the service: the one that clients were given in an earlier life of the run, else a new one."""
    try:
        known = json.loads((folder / ADDRESS_FILE).read_text())["key"]
    except (OSError, ValueError, KeyError, TypeError):
        known = None
    return known if isinstance(known, str) and len(known) >= 16 else secrets.token_urlsafe(24)


def write_address(folder: Path, url: str, key: str, model: str) -> None:
    """Tell clients where the service is: `live.json` in the run folder, which only this user can read."""
    said = {"openai_url": f"{url}/v1", "anthropic_url": url, "key": key, "model": model}
    beside = folder / f"{ADDRESS_FILE}.new"
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(said, file)
    beside.replace(folder / ADDRESS_FILE)
