"""Import paths that existing slime plugins use: re-exports, and small helpers for plugin code."""
