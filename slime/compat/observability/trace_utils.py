"""Traces of samples: the names of `slime.utils.trace_utils`."""

from slime.utils.trace_utils import *  # noqa: F403
