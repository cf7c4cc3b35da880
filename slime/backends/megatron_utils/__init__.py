"""Helpers of custom losses under the paths that slime plugins import them from. No Megatron is needed."""
