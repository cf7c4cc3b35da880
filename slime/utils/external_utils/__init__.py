"""Helpers of launch scripts under the paths that they import them from."""
