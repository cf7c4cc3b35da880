"""Configs in files: TOML or YAML with the names of the flags.

Invariant: `load_config(save_config(config)) == config`, carried flags included.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import yaml

from slime.config.config import Config
from slime.errors import UserError

RESOLVED = "# The resolved config of a run; "
"""How a config begins that a run wrote."""


def read_config_file(path: str, *, what: str = "--config") -> dict[str, Any]:
    """The top-level mapping of a TOML (.toml) or YAML (.yaml, .yml, .json) file."""
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{what}: there is no file {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{what}: cannot read {path} ({error})") from error
    try:
        content = tomllib.loads(text) if file.suffix == ".toml" else yaml.safe_load(text)
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        kind = "TOML" if file.suffix == ".toml" else "YAML"
        raise UserError(f"{what}: {path} is not valid {kind}: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UserError(f"{what}: {path} must hold a mapping of flag names to values")
    return content


def save_config(config: Config, path: str | Path) -> None:
    """Write the config as YAML that `--config` reads back to the identical object."""
    text = yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True, width=120)
    Path(path).write_text(f"{RESOLVED}start it again with --config {path}\n{text}", encoding="utf-8")


def load_config(path: str | Path) -> Config:
    """The config that `save_config` wrote."""
    return Config.from_dict(read_config_file(str(path), what="config file"))
