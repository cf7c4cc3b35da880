"""The streaming generate under the path that flags name it by: the default one loses nothing when it is cut off."""

from slime.rollout.sglang_rollout import generate as generate_streaming

__all__ = ["generate_streaming"]
