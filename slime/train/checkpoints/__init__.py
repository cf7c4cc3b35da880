"""Training checkpoints on disk."""
