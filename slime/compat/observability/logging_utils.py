"""Python logging set-up and metric logging: the names of `slime.utils.logging_utils`."""

from slime.utils.logging_utils import configure_logger, finish_tracking, init_tracking, log

__all__ = ["configure_logger", "finish_tracking", "init_tracking", "log"]
