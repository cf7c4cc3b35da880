"""Compatibility with upstream slime: tables of its flags, names and behaviours, and whole runs of plugins for it."""
