"""The command line for own drivers, under the path that they import it from."""

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
    """The flags of this process's command line, checked, with those that `add_custom_arguments(parser)` adds.

    What is changed in the namespace counts when it is given to `train` (`slime.driver.loop`, `train.py`). A mistake ends the
    process with one sentence and exit code 2, as argparse does it.
    """
    try:
        return own_namespace(config.parse_args(None, add_custom_arguments))
    except UserError as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        raise SystemExit(2) from None


def slime_validate_args(args: Any) -> None:
    """Refuse, in one sentence, flags that do not make a run."""
    config.resolve(as_config(args))
