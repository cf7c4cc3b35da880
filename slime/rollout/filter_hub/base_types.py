"""What a dynamic sampling filter answers, under the path that slime plugins import it from."""

from slime.rollout.filters import DynamicFilterOutput, call_dynamic_filter

__all__ = ["DynamicFilterOutput", "call_dynamic_filter"]
