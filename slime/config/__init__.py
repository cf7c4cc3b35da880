"""The typed configuration: flags, files, derived values and checks. Imports neither torch nor anything above it."""

from slime.config.config import Config, load_config, save_config
from slime.config.parser import parse_args, parse_flags
from slime.config.resolve import derive, resolve, resolve_for_run

__all__ = ["Config", "derive", "load_config", "parse_args", "parse_flags", "resolve", "resolve_for_run", "save_config"]
