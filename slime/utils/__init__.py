"""Thin re-exports under the import paths that existing slime plugins use; no code of its own lives here."""
