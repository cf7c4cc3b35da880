"""Python logging set-up, under the import path of slime plugins."""

from __future__ import annotations

import logging

from slime.utils.tracking_utils import finish_tracking, init_tracking, log

__all__ = ["configure_logger", "finish_tracking", "init_tracking", "log"]


def configure_logger(prefix: str = "") -> None:
    """Log to stderr unless logging is configured; in a run's processes it is, and stays unchanged."""
    logging.basicConfig(
        level=logging.INFO, format=f"[%(asctime)s{prefix}] %(filename)s:%(lineno)d - %(message)s", datefmt="%H:%M:%S"
    )
