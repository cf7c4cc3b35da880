"""Rewards: one verifier per file, and the hub that picks one for a sample."""
