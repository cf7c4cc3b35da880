"""Setting up Python's logging, under the path that slime plugins import it from."""

from __future__ import annotations

import logging

from slime.utils.tracking_utils import finish_tracking, init_tracking, log

__all__ = ["configure_logger", "finish_tracking", "init_tracking", "log"]


def configure_logger(prefix: str = "") -> None:
    """Log to stderr where nobody has set up logging; in the processes of a run it is, and stays as it is."""
    logging.basicConfig(
        level=logging.INFO, format=f"[%(asctime)s{prefix}] %(filename)s:%(lineno)d - %(message)s", datefmt="%H:%M:%S"
    )
