"""Filters that say whether a finished group is worth training on."""
