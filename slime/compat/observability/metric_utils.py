"""Reward and text statistics: the names of `slime.utils.metric_utils`."""

from slime.utils.metric_utils import *  # noqa: F403
