"""Streaming generation, under the path that flags use; it is the default one, which loses nothing on an abort."""

from slime.rollout.sglang_rollout import generate as generate_streaming

__all__ = ["generate_streaming"]
