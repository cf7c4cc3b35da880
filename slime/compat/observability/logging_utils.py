"""Python logging set-up and metric logging: the names of `slime.utils.logging_utils`."""

from slime.utils.logging_utils import *  # noqa: F403
