"""Command-line parsing for custom drivers, under the import path of upstream slime."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from slime import config
from slime.config.parser import AddCustomArguments
from slime.config.plugins.view import as_config, own_namespace
from slime.errors import UserError

__all__ = ["parse_args", "slime_validate_args"]


def parse_args(add_custom_arguments: AddCustomArguments | None = None) -> argparse.Namespace:
    """Parse and check this process's command line, with the flags that `add_custom_arguments(parser)` adds.

    Changes to the namespace take effect when it is passed to `train` (`slime.driver.loop`, `train.py`). An invalid flag
    ends the process with one sentence and exit code 2, as in argparse.
    """
    try:
        return own_namespace(config.parse_args(None, add_custom_arguments))
    except UserError as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        raise SystemExit(2) from None


def slime_validate_args(args: Any) -> None:
    """Raise a `UserError` for flags that do not form a valid run."""
    config.resolve(as_config(args))
