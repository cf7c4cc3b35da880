"""What can be said of a Hugging Face model folder before its model is built.

Invariant: nothing here imports model code, so the driver can refuse a folder before any process is started.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime.errors import UserError


def read_config_json(folder: str | Path) -> dict[str, Any]:
    """The raw config.json of a model folder."""
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise UserError(f"model folder {folder} does not exist: give the path of a Hugging Face model folder")
    if not path.is_file():
        raise UserError(f"model folder {folder} has no config.json: give the path of a Hugging Face model folder")
    try:
        facts = json.loads(path.read_text())
    except (OSError, ValueError) as cause:
        raise UserError(f"{path} cannot be read as JSON ({cause}): download the model folder again") from cause
    if not isinstance(facts, dict):
        raise UserError(f"{path} does not hold a JSON object: download the model folder again")
    return facts


def check_architecture(folder: str | Path, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """The raw config.json of a model that transformers knows, or that brings its own code and may run it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    facts = read_config_json(folder)
    model_type = facts.get("model_type")
    if not (trust_remote_code and "auto_map" in facts) and model_type not in CONFIG_MAPPING:
        remedy = "pass --trust-remote-code" if "auto_map" in facts else "use a model that transformers knows"
        raise UserError(f"model folder {folder} has unknown model_type {model_type!r} in its config.json: {remedy}")
    return facts
