"""Training state on disk."""
